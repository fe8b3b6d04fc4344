"""vLLM's types of requests, adapters, outputs and errors, under the same names in all versions."""

from __future__ import annotations

from typing import Any

from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.sample.logits_processor import LogitsProcessor

from grpo_core.wire.policy_version import PolicyVersion

try:
    from vllm.exceptions import VLLMClientError as EngineRefusal
except ImportError:  # vLLM 0.24
    EngineRefusal = ValueError

__all__ = [
    "EngineDeadError",
    "EngineGenerateError",
    "EngineRefusal",
    "LoRARequest",
    "LogitsProcessor",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TokensPrompt",
    "stamped_versions",
]


def stamped_versions(output: Any) -> list[PolicyVersion]:
    """The policy versions stamped on a finished completion, in token order; [] if none are."""
    spans = getattr(output, "weight_versions", None) or ()
    return [PolicyVersion.parse(span.version) for span in spans]
