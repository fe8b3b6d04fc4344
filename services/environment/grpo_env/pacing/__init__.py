"""Decides how many groups to start and how many failures to allow. Does no I/O."""
