"""GRPOTrainer of TRL beside this project's trainer: the same model, prompts and completions."""
