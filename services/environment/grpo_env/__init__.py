"""The environment: samples completions for a task, grades them and submits scored groups."""
