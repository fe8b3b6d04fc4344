"""The supervisor: owns the sockets and starts, restarts and stops the engine. Imports no vLLM."""
