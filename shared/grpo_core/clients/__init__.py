"""HTTP clients of run-api and of the inference server."""
