"""Several trainer processes."""
