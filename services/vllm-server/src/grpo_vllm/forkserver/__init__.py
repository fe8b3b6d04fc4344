"""Forks engine processes from one that has imported vLLM. Imports neither vLLM nor torch itself."""
