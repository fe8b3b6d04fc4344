"""The served weights: their memory and layout, export to a trainer, write lease and adapters."""
