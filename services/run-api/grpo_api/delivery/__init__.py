"""Hands batches to trainers: planning, leasing and streaming. Issues no Redis commands."""
