"""The memory plan of a run, from the model's configuration alone (`grpo --memory-plan`)."""
