"""The algorithm: advantages, loss and gradients of a batch, without I/O."""
