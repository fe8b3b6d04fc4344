"""Sampling: our server beside stock vLLM, both with the same model and engine flags."""
