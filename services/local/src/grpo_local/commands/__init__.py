"""One module per command, with the order of its work."""
