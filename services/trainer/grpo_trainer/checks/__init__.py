"""Checks that the server serves the trainer's weights and that rollouts were sampled from them."""
