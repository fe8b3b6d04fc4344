"""The engine: how it starts, what controls it and which routes it serves, on top of vLLM."""
