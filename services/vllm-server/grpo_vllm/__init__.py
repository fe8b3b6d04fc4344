"""The inference server: vLLM, with weights that a trainer can replace while requests run."""
