"""Clients of run-api and the inference server (HTTP), and of the supervisor (Redis)."""
