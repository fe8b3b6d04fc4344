"""Sweeps: one run for each combination of the values of several keys."""
