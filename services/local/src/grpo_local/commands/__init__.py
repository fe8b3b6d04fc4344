"""One module per command of this package, with its options."""
