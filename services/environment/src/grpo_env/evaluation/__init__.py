"""Evaluates a policy on items that are not in the training data."""
