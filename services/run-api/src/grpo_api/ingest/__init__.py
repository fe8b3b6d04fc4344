"""Accepts scored groups: decodes, checks, delays and places them. Issues no Redis commands."""
