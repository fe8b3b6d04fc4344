"""Records, metrics and warnings of each training step."""
