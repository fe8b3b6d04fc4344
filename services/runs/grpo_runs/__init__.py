"""Runs the whole stack on one machine, evaluates models and shows what a run has recorded."""
