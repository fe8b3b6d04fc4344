"""Checks that the server answers with the weights and the version that were published.

Three things must hold. The server's logprobs of fixed tokens must match the trainer's. So must the
logprobs of a few tokens that the server samples after a fixed prompt: this request uses the prefix
cache, so it also finds cached keys and values of older weights. And the answer must name the
published version.

If a check fails, the answer is compared with other weights that the server may hold, so that the
error can name the likely cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from grpo_core.clients.inference import Completion
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.errors import ServedWeightsDiffer
from grpo_trainer.model.adapter import adapter_scaled, without_dropout
from grpo_trainer.model.logprobs import (
    PROBE_LENGTH,
    logprobs_of,
    probe_tokens,
    sampled_tokens,
    tolerance_of,
)
from grpo_trainer.model.policy import CausalLM, vocabulary_of
from grpo_trainer.verify.alignment import (
    FAR_BETTER,
    MISMATCH,
    SAMPLED_TOKENS,
    Alignment,
    Bound,
    log_if_inconclusive,
    mean_distance,
    sampled_difference,
)

DEFAULT_BLOCK = 16
MIN_PROMPT = 2
OTHER_SCALES = (2.0, 0.5, 4.0, 0.25, 8.0, 0.125, 16.0, 0.0625)
"""Typical mistakes: lora_alpha and r exchanged, or another default."""


class Server(Protocol):
    """The requests that the check sends to the server. Both wait while it restarts."""

    def served_logprobs(self, token_ids: list[int]) -> list[float]: ...

    def sample(self, prompt_token_ids: list[int], max_tokens: int) -> Completion:
        """Sample exactly `max_tokens` tokens at temperature 1."""


@dataclass(frozen=True)
class ProbeLengths:
    """Lengths in tokens. `prompt` is one more than a block of the KV cache, so that a whole block
    can come from the cache. It is shorter if the server's maximum length requires it."""

    fixed: int
    prompt: int
    sampled: int

    @classmethod
    def fitting(cls, kv_block_size: int | None, max_model_len: int | None) -> ProbeLengths:
        longest = max_model_len or 2 * PROBE_LENGTH + (kv_block_size or DEFAULT_BLOCK)
        sampled = min(SAMPLED_TOKENS, longest // 2)
        room = max(MIN_PROMPT, longest - sampled)
        prompt = min((kv_block_size or DEFAULT_BLOCK) + 1, room)
        # a request for the prompt's logprobs also samples one token
        return cls(max(MIN_PROMPT, min(PROBE_LENGTH, longest - 1)), prompt, sampled)


class PublicationCheck:
    """Create it before training starts: it remembers the starting policy's logprobs, to recognise a
    server that still serves these weights.

    Args:
        policy: the trainer's, without dropout
        server: receives the requests

    `bound`: the tolerance for the mean |difference|; it learns the noise from the first publication
    """

    def __init__(self, policy: CausalLM, server: Server, lengths: ProbeLengths) -> None:
        self._policy = policy
        self._server = server
        self.bound = Bound(tolerance_of(policy), learns=True)
        self._tokens = sampled_tokens(policy, lengths.fixed)
        self._prompt = probe_tokens(vocabulary_of(policy), lengths.prompt)
        self._sampled = lengths.sampled
        self._base = self._previous = logprobs_of(policy, self._tokens)  # [T-1]

    def prime(self) -> None:
        """Make the server cache the prompt under the old weights, just before a publication. If the
        cache outlives those weights, the check finds it."""
        self._server.sample(self._prompt, max_tokens=1)

    def require(self, version: PolicyVersion, label: str) -> Alignment:
        """Args:
            version: the published policy version
            label: names the moment in the error message

        Raises:
            ServedWeightsDiffer: the server does not serve these weights; names the likely cause.
        """
        ours = logprobs_of(self._policy, self._tokens)
        served = torch.tensor(self._server.served_logprobs(self._tokens))
        completion = self._server.sample(self._prompt, max_tokens=self._sampled)
        sampled_off = sampled_difference(self._policy, self._prompt, completion)
        alignment = Alignment.of(served, ours, self._previous, sampled_off)
        named = {completion.first_version, completion.last_version}
        problems = self._problems(alignment, served, named, version)
        if problems:
            raise ServedWeightsDiffer(
                f"{MISMATCH} {label}, policy version {tuple(version)} is published, but "
                + "; ".join(problems)
            )
        if alignment.is_conclusive:
            self._previous = ours
        self.bound.learn(max(alignment.mean, alignment.sampled_mean or 0.0))
        log_if_inconclusive(alignment)
        return alignment

    def _problems(
        self,
        alignment: Alignment,
        served: Tensor,
        named: set[PolicyVersion],
        version: PolicyVersion,
    ) -> list[str]:
        problems = []
        other = min(mean_distance(served, self._base), alignment.previous)
        if not alignment.mean <= self.bound.value or FAR_BETTER * other < alignment.mean:
            problems.append(
                f"the server's logprobs of fixed tokens differ from the trainer's by "
                f"{alignment.mean:.2g} on average, {alignment.max:.2g} at most (tolerance "
                f"{self.bound.value:.2g}). Likely cause: {self._cause(served, alignment)}"
            )
        elif not (alignment.sampled_mean or 0.0) <= self.bound.value:
            problems.append(
                "the logprobs of tokens that the server samples differ from the trainer's by "
                f"{alignment.sampled_mean:.4f} on average (tolerance {self.bound.value:.2g}), "
                f"although the logprobs of fixed tokens agree ({alignment.mean:.2g}). Likely "
                "cause: keys and values of the previous weights are still in the server's KV cache"
            )
        if named != {version}:
            names = ", ".join(str(tuple(v)) for v in sorted(named))
            problems.append(
                f"the server's response names policy version {names}; if another trainer "
                "publishes to this server, stop that trainer"
            )
        return problems

    def _cause(self, served: Tensor, alignment: Alignment) -> str:
        base, previous, mean = mean_distance(served, self._base), alignment.previous, alignment.mean
        if FAR_BETTER * base < mean and base <= previous:
            return "the server serves the model that it was started with, without any training"
        if FAR_BETTER * previous < mean:
            return "the server still serves the weights of the previous publication"
        with without_dropout(self._policy):
            if FAR_BETTER * mean_distance(served, logprobs_of(self._policy, self._tokens)) < mean:
                return "dropout is on in the trainer's policy, which the check compares"
        for factor in OTHER_SCALES:
            if FAR_BETTER * self._distance_at_scale(served, factor) < mean:
                return (
                    f"the server multiplies the adapter by {factor:g} times the trainer's scale; "
                    "check lora_alpha and r in the published adapter_config.json"
                )
        return (
            "the server serves weights of another run, or was not started with the trainer's "
            "--model (mean difference to the untrained model of --model: "
            f"{base:.2g}, to the previous publication: {previous:.2g})"
        )

    def _distance_at_scale(self, served: Tensor, factor: float) -> float:
        with adapter_scaled(self._policy, factor):
            return mean_distance(served, logprobs_of(self._policy, self._tokens))
