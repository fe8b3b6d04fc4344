"""Shared by all services: wire records, clients, settings, logging. Never imports torch."""
