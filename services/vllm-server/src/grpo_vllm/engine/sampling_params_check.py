"""Requests that end the engine, or spoil the answers of others, are refused on every route.

vLLM shows the sampling parameters of each request to its logits processors before the engine sees
them; this one looks at them and leaves the logits alone.
"""

from __future__ import annotations

from typing import Any

import torch

from grpo_vllm.engine.vllm_compat.layers import current_platform
from grpo_vllm.engine.vllm_compat.requests import LogitsProcessor

PROCESSOR = "grpo_vllm.engine.sampling_params_check:Admission"


def refusal_of(sampling: Any) -> str | None:
    """Why `sampling` (vLLM's `SamplingParams`) cannot be served here; None where it can."""
    if sampling.seed is not None and current_platform.is_cpu():
        # vLLM rewinds a request's generator when its prefill is chunked or recomputed after a
        # pause; torch cannot rewind generators on CPU, and the engine ends.
        return "seed: not supported per request on CPU; start the server with --seed"
    if sampling.logprob_token_ids is not None:
        # vLLM's sampler then gathers these for the whole batch: other requests lose their
        # alternatives, and where they sampled token 0 its log-probability becomes -inf.
        return (
            "logprob_token_ids: not served, it spoils the logprobs of other requests; use logprobs"
        )
    if sampling.prompt_logprobs is not None and not sampling.skip_reading_prefix_cache:
        # What comes from the cache is not computed: memory of others would be answered, or end
        # the server where it makes no token id.
        return "skip_reading_prefix_cache: must not be false with prompt_logprobs"
    return None


class Admission(LogitsProcessor):  # type: ignore[misc]
    """`--logits-processors grpo_vllm.engine.sampling_params_check:Admission`"""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        refusal = refusal_of(sampling_params)
        if refusal is not None:
            raise ValueError(refusal)  # vLLM answers 400

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """Has no state."""

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        """Has no state."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits
