"""Batches on their way out, and the trainer that takes them. No Redis commands."""
