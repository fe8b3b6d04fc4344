"""The whole stack as processes of one machine: `grpo-demo`, `grpo-run`, `grpo-compare`."""
