"""The optimizer: gradients, loss scale, AdamW on master weights, and rounding. No I/O."""
