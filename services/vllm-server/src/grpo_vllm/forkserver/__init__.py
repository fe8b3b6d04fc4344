"""Starts engines fast: a process that has imported vLLM forks each of them."""
