"""Fetches a batch from run-api, filters it, and converts it to tensors."""
