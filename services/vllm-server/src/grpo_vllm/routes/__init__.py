"""HTTP on top of generation and bridge: handlers parse, call, reply."""
