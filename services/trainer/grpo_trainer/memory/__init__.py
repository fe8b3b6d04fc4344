"""The memory plan of `grpo --memory-plan`, from the model's configuration alone."""
