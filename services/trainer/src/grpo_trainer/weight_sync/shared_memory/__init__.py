"""Mode `shared_vllm`: trainer and server hold one copy of the weights, in memory."""
