"""Proves where the weights of a run come from: reads its records, and computes its steps again."""
