"""vLLM's types of requests, adapters, outputs and errors, under the same names in all versions; and
ours that vLLM finds by their names: of adapters, tokenizers and sampling parameters.

`Admission` refuses sampling parameters that would crash the engine or falsify the answers to other
requests: vLLM passes the parameters of every request, on every route, to its logits processors for
validation. It does not change the logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from vllm.inputs import TokensPrompt as TokensPrompt
from vllm.lora.request import LoRARequest as LoRARequest
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind as RequestOutputKind
from vllm.sampling_params import SamplingParams as SamplingParams
from vllm.sampling_params import StructuredOutputsParams as StructuredOutputsParams
from vllm.tokenizers.hf import CachedHfTokenizer, get_cached_tokenizer
from vllm.v1.engine.exceptions import EngineDeadError as EngineDeadError
from vllm.v1.engine.exceptions import EngineGenerateError
from vllm.v1.sample.logits_processor import LogitsProcessor

from grpo_core.weights.model_files import load_tokenizer
from grpo_core.wire.policy_version import PolicyVersion

try:
    from vllm.exceptions import VLLMClientError, VLLMServerError
except ImportError:  # vLLM before 0.27
    VLLMClientError, VLLMServerError = ValueError, EngineGenerateError
EngineRefusal = VLLMClientError
ENGINE_FAILURES = (EngineDeadError, EngineGenerateError, VLLMServerError)
"""What `generate` raises if the engine failed; 0.33 no longer wraps its errors of the server."""

PROCESSOR = "grpo_vllm.engine.vllm_compat.requests:Admission"
STAMPS_VERSIONS = "weight_versions" in CompletionOutput.__dataclass_fields__
"""Finished outputs name the weights that sampled each token (vLLM 0.32). From 0.27 on the engine
takes a version, but its outputs do not carry it."""


def stamped_versions(output: Any) -> list[PolicyVersion]:
    """The policy versions stamped on a finished completion, in token order; [] if none are."""
    spans = getattr(output, "weight_versions", None) or ()
    return [PolicyVersion.parse(span.version) for span in spans]


def refusal_of(sampling: Any) -> str | None:
    """The reason why `sampling` (vLLM's `SamplingParams`) cannot be served; None if it can."""
    if sampling.seed is not None and current_platform.is_cpu():
        # vLLM rewinds a request's random generator if its prefill is chunked or is recomputed after
        # a pause. torch cannot rewind generators on CPU, and the engine crashes.
        return "seed: not supported per request on CPU; start the server with --seed"
    if sampling.logprob_token_ids is not None:
        # vLLM's sampler then gathers these tokens for the whole batch. Other requests lose their
        # alternatives, and if they sampled token 0, its logprob becomes -inf.
        return "logprob_token_ids: falsifies the logprobs of other requests; use logprobs"
    if sampling.prompt_logprobs is not None and not sampling.skip_reading_prefix_cache:
        # Logprobs are not computed for tokens from the cache. The answer would hold uninitialised
        # memory, and the server would crash if that is not a token id.
        return "skip_reading_prefix_cache: must not be false with prompt_logprobs"
    return None


class Admission(LogitsProcessor):  # type: ignore[misc]
    """`--logits-processors grpo_vllm.engine.vllm_compat.requests:Admission`"""

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


class AdapterModules:
    """A method that vLLM adds to its worker: `--worker-extension-cls`. It reports the modules that
    a loaded adapter changes: vLLM leaves out those that it does not find."""

    model_runner: Any

    def adapter_modules(self, number: int) -> dict[str, list[str]] | None:
        """`held`: the modules that have tensors in the adapter; `computed`: the modules that this
        worker computes with adapters. In vLLM's names. None: the adapter is not loaded."""
        manager = self.model_runner.lora_manager._adapter_manager
        found = manager.get_adapter(number)
        return found and {"held": [*found.loras], "computed": [*manager.modules]}


class FileTokenizer(CachedHfTokenizer):  # type: ignore[misc]
    """The tokenizer as its tokenizer.json describes it, in place of vLLM's class."""

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo_id: str | Path,
        *,
        trust_remote_code: bool = False,
        revision: str | None = None,
        download_dir: str | None = None,
        **options: Any,
    ) -> Any:
        options |= {"revision": revision, "cache_dir": download_dir}
        loaded = load_tokenizer(
            str(path_or_repo_id), transformers, trust_remote_code=trust_remote_code, **options
        )
        return get_cached_tokenizer(loaded)
