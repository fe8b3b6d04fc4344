"""The record of each step, and where it goes."""
