"""Modes `lora_only`, `lora_restart` and `none`: the trainer publishes weights as files."""
