"""Whether the engine applies an adapter: a logprob with it must differ from that of the base model.

A difference may be below rounding, as after the first steps of a training. So if the logprobs are
equal, the adapter is loaded once more with a larger B, whose effect is beyond rounding.
"""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from typing import Any

import structlog
from safetensors.torch import load_file, save_file

from grpo_core.temporary import temporary_directory
from grpo_core.weights.directory_checks import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from grpo_vllm.engine.vllm_compat.requests import LoRARequest, SamplingParams, TokensPrompt

log = structlog.get_logger()

PROBE = [1, 2, 3, 4, 5, 6, 7, 8]
"""Token ids of any vocabulary, fewer than a block of the KV cache."""
_NUMBERS = 1 << 30
"""Added to the number of an adapter for that of its copy with a larger B."""
_B = ".lora_B."


async def require_effect(engine: Any, request: Any) -> None:
    """Samples one token for each comparison. Args: engine: vLLM's engine client

    Raises `ValueError`: the base model answers in place of the loaded adapter. While the engine
    serves others, rounding may hide that.
    """
    base = await _logprobs(engine, None)
    if await _logprobs(engine, request) != base:
        return
    tensors = load_file(Path(request.lora_path) / ADAPTER_WEIGHTS)
    size = max((float(t.abs().max()) for name, t in tensors.items() if _B in name), default=0.0)
    if size == 0:
        log.info("adapter.zero", name=request.lora_name, reason="its B is 0: the base model")
        return
    with temporary_directory() as directory:
        shutil.copyfile(Path(request.lora_path) / ADAPTER_CONFIG, directory / ADAPTER_CONFIG)
        larger = {name: t / size if _B in name else t for name, t in tensors.items()}
        save_file(larger, directory / ADAPTER_WEIGHTS)
        number = _NUMBERS + request.lora_int_id
        copy = LoRARequest(f"{request.lora_name}, larger", number, str(directory))
        try:
            await engine.add_lora(copy)
            found = await _logprobs(engine, copy)
        finally:
            await engine.remove_lora(number)
    if found == base:
        raise ValueError(
            "the server answers with the base model in its place, also after its B was divided "
            f"by its largest element, {size:.3g}; start another version of vLLM, or merge the "
            "adapter into the model"
        )
    log.info("adapter.below_rounding", name=request.lora_name, largest_b=size)


async def _logprobs(engine: Any, request: Any) -> Any:
    """Of the most probable token after the probe."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)
    outputs = engine.generate(
        TokensPrompt(prompt_token_ids=PROBE), sampling, uuid.uuid4().hex, lora_request=request
    )
    (completion,) = [output.outputs[0] async for output in outputs if output.finished]
    return [{t: value.logprob for t, value in entry.items()} for entry in completion.logprobs]
