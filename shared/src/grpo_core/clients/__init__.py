"""HTTP clients of the services: run-api and the inference server, with one retry rule."""
