"""The engine process: its start, control and application. Only `vllm_compat` imports vLLM."""
