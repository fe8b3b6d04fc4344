"""Refuses sampling parameters that would crash the engine or falsify the answers to other requests.

vLLM passes the sampling parameters of every request, on every route, to its logits processors for
validation. `Admission` is such a processor. It does not change the logits.
"""

from __future__ import annotations

from typing import Any

import torch

from grpo_vllm.engine.vllm_compat.layers import current_platform
from grpo_vllm.engine.vllm_compat.requests import LogitsProcessor

PROCESSOR = "grpo_vllm.engine.sampling_params_check:Admission"


def refusal_of(sampling: Any) -> str | None:
    """The reason why `sampling` (vLLM's `SamplingParams`) cannot be served; None if it can."""
    if sampling.seed is not None and current_platform.is_cpu():
        # vLLM rewinds a request's random generator if its prefill is chunked or is recomputed after
        # a pause. torch cannot rewind generators on CPU, and the engine crashes.
        return "seed: not supported per request on CPU; start the server with --seed"
    if sampling.logprob_token_ids is not None:
        # vLLM's sampler then gathers these tokens for the whole batch. Other requests lose their
        # alternatives, and if they sampled token 0, its logprob becomes -inf.
        return (
            "logprob_token_ids: not supported, because it falsifies the logprobs of other "
            "requests; use logprobs"
        )
    if sampling.prompt_logprobs is not None and not sampling.skip_reading_prefix_cache:
        # Logprobs are not computed for tokens from the cache. The answer would hold uninitialised
        # memory, and the server would crash if that is not a token id.
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
