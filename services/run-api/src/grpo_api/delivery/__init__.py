"""Batches on their way out, to the trainer that is registered."""
