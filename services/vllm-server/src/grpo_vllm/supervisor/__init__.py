"""The process above the engine: owns the sockets and the engine process, imports no vLLM."""
