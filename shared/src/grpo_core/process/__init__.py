"""Child processes, and objects that are closed when a block is left. No command of a service."""
