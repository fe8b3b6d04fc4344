"""Metrics for Prometheus, and logs. Reads numbers, changes nothing."""
