"""The engine: starts vLLM, controls it and adds this project's routes to its application."""
