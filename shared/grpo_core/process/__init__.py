"""Child processes, and base classes of objects that close when a `with` block ends."""
