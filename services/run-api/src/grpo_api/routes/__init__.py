"""HTTP handlers by noun: parse, call, reply."""
