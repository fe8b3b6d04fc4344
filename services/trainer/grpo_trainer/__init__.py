"""The GRPO trainer: takes batches from run-api, updates the policy and publishes its weights."""
