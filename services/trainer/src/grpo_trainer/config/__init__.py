"""Options of `grpo`. Imports no torch."""
