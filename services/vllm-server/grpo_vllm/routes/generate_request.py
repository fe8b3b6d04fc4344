"""Parses and checks the body of `POST /generate`; every refusal names the wrong field."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from grpo_core.errors import GrpoError
from grpo_vllm.engine.vllm_compat.requests import (
    EngineRefusal,
    SamplingParams,
    StructuredOutputsParams,
    refusal_of,
)

MAX_COMPLETIONS = 1024
MAX_NESTING = 64
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 100.0
"""The largest `repetition_penalty`; the smallest is its inverse."""
MAX_STRUCTURED_BYTES = 16 * 1024
"""The engine compiles grammars one at a time. One of two megabytes would delay the others by
minutes."""

_SET_BY_SERVER = "the server sets this parameter; omit it"
REFUSED: Mapping[str, str] = {
    "output_kind": _SET_BY_SERVER,
    "skip_clone": _SET_BY_SERVER,
    "output_text_buffer_length": _SET_BY_SERVER,
    "detokenize": _SET_BY_SERVER,
    "flat_logprobs": _SET_BY_SERVER,
    "prompt_logprob_token_ids": "the server does not support this parameter; use prompt_logprobs",
    "prompt_logprob_start": "the server does not support this parameter; use prompt_logprobs",
    "watermarking": "the server does not support it: sampling changes, and the logprobs do not",
}
"""vLLM's sampling parameters that a client may not set: name → reason."""
SAMPLED_TOKENS_ONLY = 0
"""The default of `logprobs`: those of the sampled tokens. vLLM's own default is none. `true` means
1, and `false` none."""

_NESTED_FIELDS = {
    "structured_outputs": frozenset(
        f.name for f in dataclasses.fields(StructuredOutputsParams) if f.init
    ),
    "repetition_detection": frozenset({"max_pattern_size", "min_pattern_size", "min_count"}),
}


REQUEST_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "required": ["prompt"],
    "properties": {
        "prompt": {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {
                    "type": "object",
                    "required": ["prompt_token_ids"],
                    "additionalProperties": False,
                    "properties": {
                        "prompt_token_ids": {
                            "type": "array",
                            "minItems": 1,
                            "items": {"type": "integer", "minimum": 0},
                        }
                    },
                },
            ]
        },
        "stream": {"type": "boolean"},
        "n": {"type": "integer", "minimum": 1, "maximum": MAX_COMPLETIONS},
    },
}
"""What every request has. The other properties are sampling parameters of vLLM."""


class BadGenerateRequest(GrpoError):
    """The request is wrong; the message names the parameter."""


@dataclass(frozen=True)
class GenerateRequest:
    """A checked request.

    `prompt_token_ids`: [T]; `prompt_text`: the text as sent, None if token ids were sent;
    `sampling`: vLLM's `SamplingParams`.
    """

    prompt_token_ids: list[int]
    prompt_text: str | None
    sampling: Any
    stream: bool


def parse_generate_request(body: bytes, model_config: Any, tokenizer: Any) -> GenerateRequest:
    """Check a request completely before the engine gets it. Raises `BadGenerateRequest`
    with the name of each wrong parameter."""
    try:
        parameters = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadGenerateRequest(f"body: not valid JSON: {error}") from error
    if not isinstance(parameters, dict):
        raise BadGenerateRequest("body: expected a JSON object")
    stream = parameters.pop("stream", False)
    if not isinstance(stream, bool):
        raise BadGenerateRequest(f"stream: expected true or false, got {stream!r}")
    prompt = parameters.pop("prompt", None)
    text = prompt if isinstance(prompt, str) else None
    token_ids = _prompt_token_ids(prompt, model_config, tokenizer)
    if not token_ids:
        raise BadGenerateRequest("prompt: expected at least one token")
    if len(token_ids) >= model_config.max_model_len:
        raise BadGenerateRequest(
            f"prompt: {len(token_ids)} tokens fill the context of {model_config.max_model_len}"
        )
    vocabulary = model_config.get_vocab_size()
    for i, token in enumerate(token_ids):
        if type(token) is not int or not 0 <= token < vocabulary:
            raise BadGenerateRequest(
                f"prompt_token_ids[{i}]: {token!r} is not a token id below {vocabulary}"
            )
    logprobs = parameters.get("logprobs", SAMPLED_TOKENS_ONLY)
    if isinstance(logprobs, bool):
        logprobs = 1 if logprobs else None
    parameters["logprobs"] = logprobs
    return GenerateRequest(token_ids, text, _sampling_params(parameters), stream)


def _prompt_token_ids(prompt: Any, model_config: Any, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        if len(prompt) > model_config.max_model_len * tokenizer.max_chars_per_token:
            raise BadGenerateRequest(
                f"prompt: {len(prompt)} characters exceed a context of {model_config.max_model_len}"
            )
        token_ids: list[int] = tokenizer.encode(prompt)
        return token_ids
    known = isinstance(prompt, dict) and set(prompt) == {"prompt_token_ids"}
    if known and isinstance(prompt["prompt_token_ids"], list):
        return list(prompt["prompt_token_ids"])
    raise BadGenerateRequest('prompt: expected a string or {"prompt_token_ids": [int, ...]}')


def _sampling_params(parameters: dict[str, Any]) -> Any:
    problems = list(_problems(parameters))
    if problems:
        raise BadGenerateRequest("; ".join(problems))
    try:
        sampling = msgspec.convert(parameters, SamplingParams, str_keys=True)
    except (EngineRefusal, msgspec.ValidationError, ValueError, TypeError) as error:
        raise BadGenerateRequest(f"sampling parameters: {error}") from error
    problems = list(_unsafe_values(sampling))
    if problems:
        raise BadGenerateRequest("; ".join(problems))
    return sampling


def _problems(parameters: dict[str, Any]) -> Iterator[str]:
    """Mistakes that vLLM misses or detects only inside the engine."""
    known = {f for f in SamplingParams.__struct_fields__ if not f.startswith("_")}
    unknown = sorted(set(parameters) - known)
    if unknown:
        yield f"unknown parameters: {', '.join(unknown)}"
    yield from (f"{name}: {REFUSED[name]}" for name in parameters if name in REFUSED)
    n = parameters.get("n", 1)
    if type(n) is not int or not 1 <= n <= MAX_COMPLETIONS:
        yield f"n: expected an integer from 1 to {MAX_COMPLETIONS}, got {n!r}"
    for name, fields in _NESTED_FIELDS.items():
        value = parameters.get(name)
        unknown = sorted(set(value) - fields) if isinstance(value, dict) else []
        if unknown:
            yield f"{name}: unknown fields {', '.join(unknown)}"
    deep = [
        name
        for name in ("structured_outputs", "extra_args")
        if _is_nested_deeper(parameters.get(name), MAX_NESTING)
    ]
    if deep:
        yield f"{', '.join(deep)}: nested deeper than {MAX_NESTING} levels"
        return
    structured_bytes = len(orjson.dumps(parameters.get("structured_outputs")))
    if structured_bytes > MAX_STRUCTURED_BYTES:
        yield f"structured_outputs: {structured_bytes} bytes; the limit is {MAX_STRUCTURED_BYTES}"


def _unsafe_values(sampling: Any) -> Iterator[str]:
    """Values that would crash the engine, or overflow the logits so that logprobs become NaN."""
    refusal = refusal_of(sampling)
    if refusal is not None:
        yield refusal
    biases = (sampling.logit_bias or {}).values()
    if any(abs(bias) > MAX_LOGIT_BIAS for bias in biases):
        worst = max(biases, key=abs)
        yield f"logit_bias: expected values of at most ±{MAX_LOGIT_BIAS:g}, got {worst:g}"
    value = sampling.repetition_penalty
    if not 1 / MAX_PENALTY <= value <= MAX_PENALTY:
        yield f"repetition_penalty: expected {1 / MAX_PENALTY:g} to {MAX_PENALTY:g}, got {value:g}"


def _is_nested_deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(levels == 0 or _is_nested_deeper(child, levels - 1) for child in inner)
