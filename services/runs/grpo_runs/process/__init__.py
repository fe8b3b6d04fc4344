"""Starts, checks, measures and stops processes."""
