"""Saves checkpoints and exported models, and resumes a run from a checkpoint."""
