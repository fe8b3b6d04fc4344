"""Lua scripts of the store; each file's header documents its KEYS, ARGV and answers."""
