"""The served weights: memory, layout, export, write lease, version, adapters. No routes."""
