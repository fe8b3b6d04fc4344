"""Accepts scored groups: decodes, checks, then queues or buffers them. Issues no Redis commands."""
