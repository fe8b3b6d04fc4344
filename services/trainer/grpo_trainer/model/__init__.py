"""The policy: how it is loaded, and how its logprobs are computed."""
