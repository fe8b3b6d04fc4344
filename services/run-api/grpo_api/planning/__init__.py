"""Decides which groups form a batch and where submitted groups go. Pure functions, no I/O."""
