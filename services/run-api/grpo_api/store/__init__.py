"""Stores the run's state in Redis."""
