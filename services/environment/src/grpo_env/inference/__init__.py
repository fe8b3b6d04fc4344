"""The inference servers that completions come from."""
