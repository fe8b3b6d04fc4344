"""A run in Weights & Biases, in a child process, so that W&B never blocks the process itself."""
