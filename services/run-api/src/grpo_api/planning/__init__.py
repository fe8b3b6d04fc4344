"""Which groups make a batch, and where groups are placed. Pure: no I/O, no client."""
