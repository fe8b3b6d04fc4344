"""Scored groups on their way in: decode, check, place."""
