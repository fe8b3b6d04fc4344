"""How trainer and inference server exchange weights: files, shared memory and commands."""
