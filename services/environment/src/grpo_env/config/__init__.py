"""Options of `env-server`, from the command line and from files."""
