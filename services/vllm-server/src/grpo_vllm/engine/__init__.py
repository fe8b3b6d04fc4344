"""The engine: starts vLLM, controls it and adds our routes to its application."""
