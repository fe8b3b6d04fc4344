"""Scored groups on their way in: decode, check, hold back, place. No Redis commands."""
