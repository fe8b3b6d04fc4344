"""`POST /generate`: from the request's JSON to vLLM and back, without HTTP."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from grpo_core.errors import GrpoError
from grpo_core.wire import PolicyVersion
from grpo_vllm.engine_internals import (
    RequestOutputKind,
    SamplingParams,
    TokensPrompt,
    current_platform,
    stamped_versions,
    stamps_versions,
)

SERVER_OWNED_PARAMETERS = frozenset(
    {"output_kind", "skip_clone", "output_text_buffer_length", "detokenize", "flat_logprobs"}
)
MAX_COMPLETIONS = 1024
FINISHED = frozenset({"stop", "length", "repetition"})


class BadGenerateRequest(GrpoError):
    """The request is wrong; the message names the parameter."""


class GenerationFailed(GrpoError):
    """The engine gave the request up; nothing of it may be used."""


@dataclass(frozen=True)
class GenerateRequest:
    """A checked request: `prompt_token_ids` [T] and vLLM's sampling parameters."""

    prompt_token_ids: list[int]
    sampling: Any


@dataclass
class PartialCompletion:
    """Grows by what the engine has sampled since the last look."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    first_version: PolicyVersion | None = None
    last_version: PolicyVersion | None = None

    def extend(self, piece: Any, version: PolicyVersion) -> None:
        """Add a piece of vLLM's output. The engine's own stamps count, where it leaves any;
        else `version`, what is served as the piece arrives."""
        self.text.append(piece.text)
        self.finish_reason = piece.finish_reason or self.finish_reason
        if not piece.token_ids:
            return
        self.token_ids.extend(piece.token_ids)
        stamps = stamped_versions(piece) or [version]
        self.first_version = self.first_version or stamps[0]
        self.last_version = stamps[-1]
        for token, entry in zip(piece.token_ids, piece.logprobs or (), strict=False):
            self.logprobs.append(_sampled_first(token, entry))

    def versions(self) -> list[list[int]]:
        """[[epoch, step] at the first token, [epoch, step] at the last]"""
        return [list(version) for version in (self.first_version, self.last_version) if version]


def parse_generate_request(body: Any, model_config: Any, tokenizer: Any) -> GenerateRequest:
    """Check everything that can be checked before the engine sees the request.

    Raises:
        BadGenerateRequest: names what is wrong.
    """
    if not isinstance(body, dict):
        raise BadGenerateRequest("body: expected a JSON object")
    parameters = dict(body)
    if parameters.pop("stream", False):
        raise BadGenerateRequest("stream: not supported on /generate; use /v1/completions")
    prompt = parameters.pop("prompt", None)
    token_ids = _prompt_token_ids(prompt, tokenizer)
    _check_prompt(token_ids, model_config)
    return GenerateRequest(token_ids, _sampling_params(parameters))


async def generate(
    engine: Any, request: GenerateRequest, current_version: Callable[[], PolicyVersion]
) -> dict[str, Any]:
    """Run the request to its end and build the answer.

    Cancelling this coroutine aborts the request in the engine.

    Raises:
        GenerationFailed: a completion was aborted or ended without a reason.
    """
    completions = [PartialCompletion() for _ in range(request.sampling.n)]
    # Pieces as they are sampled are only needed where versions must be read off their arrival.
    whole = stamps_versions(engine)
    kind = RequestOutputKind.FINAL_ONLY if whole else RequestOutputKind.DELTA
    request.sampling.output_kind = kind
    prompt = TokensPrompt(prompt_token_ids=request.prompt_token_ids)
    last = None
    prompt_logprobs = None
    async for output in engine.generate(prompt, request.sampling, uuid.uuid4().hex):
        last, version = output, current_version()
        prompt_logprobs = output.prompt_logprobs or prompt_logprobs
        for piece in output.outputs:
            completions[piece.index].extend(piece, version)
    if last is None or any(c.finish_reason not in FINISHED for c in completions):
        reasons = [c.finish_reason for c in completions]
        raise GenerationFailed(f"generation was given up by the engine (finish reasons {reasons})")
    prompt_text = last.prompt or engine.get_tokenizer().decode(request.prompt_token_ids)
    return _answer(request, completions, prompt_text, prompt_logprobs)


def _answer(
    request: GenerateRequest,
    completions: list[PartialCompletion],
    prompt_text: str,
    prompt_logprobs: Any,
) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "text": ["".join(c.text) for c in completions],
        "prompt": prompt_text,
        "finish_reasons": [c.finish_reason for c in completions],
        "prompt_token_ids": request.prompt_token_ids,
        "token_ids": [c.token_ids for c in completions],
        "policy_version": [c.versions() for c in completions],
    }
    if request.sampling.logprobs is not None:
        answer["logprobs"] = [[[entry] for entry in c.logprobs] for c in completions]
    if request.sampling.prompt_logprobs is not None:
        answer["prompt_logprobs"] = [
            None if entry is None else _finite(entry) for entry in prompt_logprobs or ()
        ]
    return answer


def _prompt_token_ids(prompt: Any, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        token_ids: list[int] = tokenizer.encode(prompt)
        return token_ids
    if isinstance(prompt, dict) and isinstance(prompt.get("prompt_token_ids"), list):
        return list(prompt["prompt_token_ids"])
    raise BadGenerateRequest('prompt: expected a string or {"prompt_token_ids": [int, ...]}')


def _check_prompt(token_ids: list[int], model_config: Any) -> None:
    if not token_ids:
        raise BadGenerateRequest("prompt: empty")
    vocabulary = model_config.get_vocab_size()
    for i, token in enumerate(token_ids):
        if type(token) is not int or not 0 <= token < vocabulary:
            raise BadGenerateRequest(
                f"prompt_token_ids[{i}]: {token!r} is not a token id below {vocabulary}"
            )
    if len(token_ids) >= model_config.max_model_len:
        raise BadGenerateRequest(
            f"prompt: {len(token_ids)} tokens leave no room in a context of "
            f"{model_config.max_model_len}"
        )


def _sampling_params(parameters: dict[str, Any]) -> Any:
    known = {f for f in SamplingParams.__struct_fields__ if not f.startswith("_")}
    unknown = sorted(set(parameters) - (known - SERVER_OWNED_PARAMETERS))
    if unknown:
        raise BadGenerateRequest(f"unknown parameters: {', '.join(unknown)}")
    if parameters.get("seed") is not None and current_platform.is_cpu():
        # A seeded request whose prefill is chunked, or recomputed after a pause, ends the engine.
        raise BadGenerateRequest("seed: not supported per request on CPU; start with --seed")
    n = parameters.get("n", 1)
    if type(n) is not int or not 1 <= n <= MAX_COMPLETIONS:
        raise BadGenerateRequest(f"n: expected an integer from 1 to {MAX_COMPLETIONS}, got {n!r}")
    try:
        sampling = msgspec.convert(parameters, SamplingParams)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise BadGenerateRequest(f"sampling parameters: {error}") from error
    return sampling


def _sampled_first(token: int, entry: Any) -> dict[int, float]:
    """The sampled token leads; alternatives that were cut to probability 0 are left out."""
    return {token: entry[token].logprob, **_finite(entry)}


def _finite(entry: Any) -> dict[int, float]:
    return {t: lp.logprob for t, lp in entry.items() if math.isfinite(lp.logprob)}
