"""Metrics for Prometheus, and logs."""
