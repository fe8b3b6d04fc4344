"""Benchmarks. Each is one command; its numbers are a section of RESULTS.md."""
