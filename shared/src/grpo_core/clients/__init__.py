"""Clients of the services: run-api and inference server over HTTP, with one retry rule, and the
server's supervisor over Redis. No service's own logic."""
