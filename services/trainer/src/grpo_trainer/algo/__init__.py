"""Advantages, the loss, and gradients over micro-batches. Pure: no I/O, no client."""
