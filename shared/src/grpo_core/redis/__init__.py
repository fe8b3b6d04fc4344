"""Redis for every service: connections, the URL, names of keys. What a service says there is in
that service, or in `grpo_core.weights.supervisor_protocol`."""
