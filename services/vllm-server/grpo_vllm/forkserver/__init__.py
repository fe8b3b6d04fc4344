"""The fork server: starts engines fast, as forks of a process that has imported vLLM."""
