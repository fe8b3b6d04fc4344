"""Prometheus metrics and logging of run-api."""
