"""GRPO trainer: batch, advantages, loss, update, served weights."""
