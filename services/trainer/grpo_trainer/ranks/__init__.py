"""Several trainer processes (ranks): they share the computation of each step."""
