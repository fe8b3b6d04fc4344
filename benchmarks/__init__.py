"""Benchmarks. Each is one command; its numbers are a section of docs/contributing/benchmarks.md."""
