"""HTTP handlers by noun: parse, call, reply. No Redis commands."""
