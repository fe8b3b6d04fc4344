"""Hundreds of servers that follow a run, in virtual time: the protocol's own code, on a network
that is computed."""
