"""Redis connections, URLs and key names, shared by all services."""
