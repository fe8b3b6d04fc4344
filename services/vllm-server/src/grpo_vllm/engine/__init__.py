"""The engine process. `vllm_compat` is the only module that imports vLLM."""
