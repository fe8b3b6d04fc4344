"""Options of `env-server`, and the names that Atropos gives them."""
