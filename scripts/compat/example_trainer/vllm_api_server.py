"""Runs `vllm-api-server`."""

from __future__ import annotations

from grpo_vllm.__main__ import main

if __name__ == "__main__":
    main()
