"""Turns a batch from run-api into tensors: fetches, filters and collates it, and counts
problems."""
