"""What every service shares: wire models, clients, settings, logging. Never imports torch."""
