"""Stores the run's state in Redis: each change of several keys is one Lua script in `lua/`, where
`common.lua` has the functions that the scripts share."""
