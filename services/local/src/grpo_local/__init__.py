"""Runs the whole stack on one machine: `grpo-demo`, `grpo-run`, `grpo-compare`. Shows its
rollouts: `grpo-rollouts`."""
