"""Rollouts on disk: one compressed file per training step, for people and tools that read them."""
