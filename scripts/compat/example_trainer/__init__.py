"""Module names of the archived trainer, for its command lines."""
