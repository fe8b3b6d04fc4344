"""Environments: a prompt out, a scored group in."""
