"""Where rollouts are sampled, and how new weights get there."""
