"""Modes `lora_only`, `lora_restart` and `none`: weights reach the server as files."""
