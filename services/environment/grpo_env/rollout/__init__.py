"""Samples and grades a group, submits it and counts the outcome."""
