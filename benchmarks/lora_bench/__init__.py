"""Decoding with a LoRA adapter: our server beside stock vLLM, both on the same adapter."""
