"""Runs environments that were written for other libraries as tasks."""
