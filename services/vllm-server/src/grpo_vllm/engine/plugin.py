"""Entry point `vllm.general_plugins`: vLLM calls it in each of its processes."""

from __future__ import annotations

import os

from grpo_vllm.engine.lifeline import end_with_the_engine_process
from grpo_vllm.engine.plugin_names import SHARE_WEIGHTS_VARIABLE


def register() -> None:
    """Register the shared load format where the server asked for it, and tie this process to the
    engine process. Touches nothing else."""
    end_with_the_engine_process()
    if os.environ.get(SHARE_WEIGHTS_VARIABLE) == "1":
        import grpo_vllm.weights.loader  # noqa: F401  (importing registers the load format)
