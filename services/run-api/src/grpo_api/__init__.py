"""Trajectory server: scored groups in, training batches out, state in Redis."""
