"""From gradients to updated weights. Pure: no I/O, no client."""
