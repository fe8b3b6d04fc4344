"""Runs the whole stack as processes of one machine."""
