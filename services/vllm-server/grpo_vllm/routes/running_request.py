"""Runs a checked generation request in the engine and builds the body of its answer."""

from __future__ import annotations

import math
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from grpo_core.errors import GrpoError
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.receipt import NEUTRAL_SAMPLING, distribution, receipts_of
from grpo_vllm.engine.vllm_compat.requests import (
    ENGINE_FAILURES,
    STAMPS_VERSIONS,
    EngineRefusal,
    RequestOutputKind,
    TokensPrompt,
    stamped_versions,
)
from grpo_vllm.routes.generate_request import BadGenerateRequest, GenerateRequest
from grpo_vllm.weights.lora import LoadedAdapter

FINISHED = frozenset({"stop", "length", "repetition"})
RESTRICTING = ["allowed_token_ids", "bad_words", "logit_bias", "min_tokens", "structured_outputs"]
"""Parameters that together can exclude every token."""


class GenerationFailed(GrpoError):
    """The engine did not finish the request. No part of its output may be used."""


class NonFiniteLogprob(GenerationFailed):
    """A sampled token's logprob is NaN or infinite, so the weights probably contain NaN."""


@dataclass
class GrowingCompletion:
    """One completion while the engine samples it. `logprobs`: by token, the sampled one first.

    Example: two tokens of the answer "7", between which the weights were updated:

        token_ids      [90, 91]                 text           "7"
        logprobs       [{90: -0.4}, {91: -1.2}]
        first_version  (1, 7)                   last_version   (1, 8)
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    first_version: PolicyVersion | None = None
    last_version: PolicyVersion | None = None

    def extend(self, piece: Any, arrived_under: PolicyVersion, stamped: bool) -> None:
        """Add a piece of vLLM's output, which arrived when the policy version `arrived_under` was
        served. `stamped`: prefer the engine's own version stamps. They name the base model's
        weights, never an adapter."""
        self.text += piece.text
        self.finish_reason = piece.finish_reason or self.finish_reason
        if piece.token_ids:
            self.token_ids.extend(piece.token_ids)
            self.first_version = self.first_version or arrived_under
            self.last_version = arrived_under
        for token, entry in zip(piece.token_ids, piece.logprobs or (), strict=False):
            self.logprobs.append(_sampled_first(token, entry))
        # The last piece carries the stamps of all tokens.
        stamps = stamped_versions(piece) if stamped else []
        if stamps:
            self.first_version, self.last_version = stamps[0], stamps[-1]

    def sampled_logprobs(self) -> Iterator[float]:
        return (next(iter(entry.values())) for entry in self.logprobs)

    def versions(self) -> list[list[int]]:
        """[[epoch, step] at the first token, [epoch, step] at the last token]"""
        return [list(version) for version in (self.first_version, self.last_version) if version]


class RunningRequest:
    """One request that runs in the engine.

    Args:
        engine: vLLM's engine client
        current_version: the served policy version, for engines that do not stamp tokens
        adapter: the adapter that samples the whole request, even if a newer one is loaded
            meanwhile; None for the model without an adapter
    """

    def __init__(
        self,
        engine: Any,
        request: GenerateRequest,
        current_version: Callable[[], PolicyVersion],
        adapter: LoadedAdapter | None = None,
    ) -> None:
        self.completions = [GrowingCompletion() for _ in range(request.sampling.n)]
        self._engine = engine
        self.request = request
        self._adapter = adapter
        self._version_now = current_version
        self._prompt_logprobs: Any = None

    @property
    def prompt_text(self) -> str:
        """The prompt's text as sent, or decoded from the token ids."""
        if self.request.prompt_text is not None:
            return self.request.prompt_text
        text: str = self._engine.get_tokenizer().decode(self.request.prompt_token_ids)
        return text

    async def advance(self) -> AsyncGenerator[None, None]:
        """Yields whenever `completions` have grown; ends when all of them are complete. Closing
        the generator aborts the request in the engine.

        Raises:
            BadGenerateRequest: the engine refused a parameter.
            GenerationFailed: the engine aborted a completion, or it has no finish reason.
        """
        prompt = TokensPrompt(prompt_token_ids=self.request.prompt_token_ids)
        sampling = self.request.sampling
        # Pieces are needed for a stream, and if the time of their arrival determines the version.
        in_pieces = self.request.stream or not STAMPS_VERSIONS
        kinds = RequestOutputKind
        sampling.output_kind = kinds.DELTA if in_pieces else kinds.FINAL_ONLY
        try:
            outputs = self._engine.generate(
                prompt,
                sampling,
                uuid.uuid4().hex,
                lora_request=self._adapter.request if self._adapter else None,
            )
            async with aclosing(outputs):
                async for output in outputs:
                    self._take(output)
                    yield
        except EngineRefusal as error:
            parameter = getattr(error, "parameter", None)
            if parameter is None and sampling.structured_outputs is not None:
                parameter = "structured_outputs"
            what = parameter or "sampling parameters"
            raise BadGenerateRequest(f"{what}: {error}") from error
        except ENGINE_FAILURES as error:
            raise GenerationFailed(f"the engine failed: {error.__cause__ or error}") from error
        self._check_complete()

    def answer(self) -> dict[str, Any]:
        """The body of the answer. Call this when `advance` has ended."""
        request, completions = self.request, self.completions
        answer: dict[str, Any] = {
            "text": [c.text for c in completions],
            "prompt": self.prompt_text,
            "finish_reasons": [c.finish_reason for c in completions],
            "prompt_token_ids": request.prompt_token_ids,
            "token_ids": [c.token_ids for c in completions],
            "policy_version": [c.versions() for c in completions],
        }
        if request.sampling.logprobs is not None:
            answer["logprobs"] = [[[entry] for entry in c.logprobs] for c in completions]
            answer["receipts"] = self._receipts()
        if request.sampling.prompt_logprobs is not None:
            answer["prompt_logprobs"] = [
                None if entry is None else _finite(entry) for entry in self._prompt_logprobs or ()
            ]
        return answer

    def _receipts(self) -> list[dict[str, Any]]:
        """One for each completion."""
        sampling = self.request.sampling
        given = {name: getattr(sampling, name) for name in NEUTRAL_SAMPLING}
        return receipts_of(
            self.request.prompt_token_ids,
            ((c.token_ids, c.sampled_logprobs(), c.versions()) for c in self.completions),
            distribution(sampling.temperature, given),
        )

    def _take(self, output: Any) -> None:
        version = self._adapter.version if self._adapter else self._version_now()
        self._prompt_logprobs = output.prompt_logprobs or self._prompt_logprobs
        try:
            for piece in output.outputs:
                self.completions[piece.index].extend(piece, version, stamped=not self._adapter)
        except NonFiniteLogprob as error:
            restricting = [name for name in RESTRICTING if getattr(self.request.sampling, name)]
            if not restricting:
                raise
            raise BadGenerateRequest(
                f"{', '.join(restricting)}: these constraints leave no token to sample"
            ) from error

    def _check_complete(self) -> None:
        reasons = [c.finish_reason for c in self.completions]
        if all(reason in FINISHED for reason in reasons):
            return
        if "error" in reasons and self.request.sampling.structured_outputs is not None:
            raise BadGenerateRequest(
                "structured_outputs: the engine cannot follow this grammar: it recurses without "
                "end, or other parameters exclude every token that it allows"
            )
        raise GenerationFailed(
            f"the engine stopped before all completions had ended (finish reasons {reasons})"
        )


def _sampled_first(token: int, entry: Any) -> dict[int, float]:
    """Token id → logprob: the sampled token first, then alternatives with a finite logprob.

    Raises `NonFiniteLogprob` if the sampled token's logprob is not finite.
    """
    sampled = entry[token].logprob
    if not math.isfinite(sampled):
        raise NonFiniteLogprob(
            f"token {token} was sampled with logprob {sampled}; check the weights for NaN"
        )
    return {token: sampled, **_finite(entry)}


def _finite(entry: Any) -> dict[int, float]:
    return {t: lp.logprob for t, lp in entry.items() if math.isfinite(lp.logprob)}
