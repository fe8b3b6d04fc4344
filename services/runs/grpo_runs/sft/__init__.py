"""Supervised training of a model before GRPO, with TRL's SFTTrainer."""
