"""What every service shares: wire records, clients, settings, logging. Never imports torch."""
