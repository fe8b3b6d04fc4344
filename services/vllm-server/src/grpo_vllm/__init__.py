"""Inference server: vLLM whose weights a trainer can share, and control over updates."""
