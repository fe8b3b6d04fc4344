"""Lua scripts of the store. The header of each file documents its KEYS, ARGV and answers."""
