"""Actions of `env-server` that need no trainer: process, evaluate and check."""
