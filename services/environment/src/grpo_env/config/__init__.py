"""Options of `env-server`, from the command line and from a file. Nothing that acts on them."""
