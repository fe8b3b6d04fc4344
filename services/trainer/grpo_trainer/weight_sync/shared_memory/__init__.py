"""Mode `shared_vllm`: trainer and server share one copy of the weights in memory."""
