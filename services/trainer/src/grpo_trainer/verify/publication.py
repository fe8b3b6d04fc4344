"""Checks a publication: does the server answer with the weights that were handed to it?

Three things must hold. The served log-probabilities of fixed tokens are the trainer's. So are
those of a few tokens that the server samples behind a fixed prompt: that request goes through the
prefix cache, which the first one does not read, so keys and values that outlived the weights show
here. And the answer names the version that was published.

Both requests are of the kind that everybody sends. A difference is held against what else the
server could be serving, so that the error names the likely cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from grpo_core.clients.inference import Completion
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.errors import ServedWeightsDiffer
from grpo_trainer.model.logprobs import (
    PROBE_LENGTH,
    logprobs_of,
    probe_tokens,
    sampled_tokens,
    tolerance_of,
)
from grpo_trainer.model.policy_protocol import CausalLM
from grpo_trainer.verify.alignment import (
    FAR_BETTER,
    MISMATCH,
    Alignment,
    Bound,
    log_if_inconclusive,
    mean_distance,
)

SAMPLED_TOKENS = 16
DEFAULT_BLOCK = 16
MIN_PROMPT = 2


class Server(Protocol):
    """What is asked of the inference server; both wait while it restarts."""

    def served_logprobs(self, token_ids: list[int]) -> list[float]: ...

    def sample(self, prompt_token_ids: list[int], max_tokens: int) -> Completion:
        """At temperature 1, exactly so many tokens."""


@dataclass(frozen=True)
class ProbeLengths:
    """In tokens. `prompt`: one more than a block of the KV cache, so that a whole block can come
    from the cache, where the server's longest sequence leaves room for it."""

    fixed: int
    prompt: int
    sampled: int

    @classmethod
    def fitting(cls, kv_block_size: int | None, max_model_len: int | None) -> ProbeLengths:
        longest = max_model_len or 2 * PROBE_LENGTH + (kv_block_size or DEFAULT_BLOCK)
        sampled = min(SAMPLED_TOKENS, longest // 2)
        room = max(MIN_PROMPT, longest - sampled)
        prompt = min((kv_block_size or DEFAULT_BLOCK) + 1, room)
        # a request for log-probabilities of the prompt samples a token behind it
        return cls(max(MIN_PROMPT, min(PROBE_LENGTH, longest - 1)), prompt, sampled)


class PublicationCheck:
    """Made while the policy is still what the server was started with, so that it knows how that
    would answer.

    Args:
        policy: the trainer's, without dropout
        server: who is asked

    `bound`: on the mean |difference|; it learns the noise from the first publication
    """

    def __init__(self, policy: CausalLM, server: Server, lengths: ProbeLengths) -> None:
        self._policy = policy
        self._server = server
        self.bound = Bound(tolerance_of(policy), learns=True)
        self._tokens = sampled_tokens(policy, lengths.fixed)
        self._prompt = probe_tokens(policy.config.vocab_size, lengths.prompt)
        self._sampled = lengths.sampled
        self._base = self._previous = logprobs_of(policy, self._tokens)  # [T-1]

    def prime(self) -> None:
        """Right before a publication: have the prompt in the server's cache under the old weights.
        If those keys and values outlive the weights, the check shall meet them."""
        self._server.sample(self._prompt, max_tokens=1)

    def require(self, version: PolicyVersion, label: str) -> Alignment:
        """Args:
            version: under which the policy's weights are served
            label: of the moment, for the message

        Raises:
            ServedWeightsDiffer: they are not; names the likely cause.
        """
        ours = logprobs_of(self._policy, self._tokens)
        served = torch.tensor(self._server.served_logprobs(self._tokens))
        completion = self._server.sample(self._prompt, max_tokens=self._sampled)
        sampled_off = self._sampled_difference(completion)
        alignment = Alignment.of(served, ours, self._previous, float(sampled_off.mean()))
        named = {completion.first_version, completion.last_version}
        problems = self._problems(alignment, served, named, version)
        if problems:
            raise ServedWeightsDiffer(
                f"{MISMATCH} {label}, version {tuple(version)} is announced, and "
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
                f"the server's log-probabilities of fixed tokens differ from the trainer's by "
                f"{alignment.mean:.2g} on average, {alignment.max:.2g} at most (tolerance "
                f"{self.bound.value:.2g}). Likely cause: {self._cause(served, alignment)}"
            )
        elif not (alignment.sampled_mean or 0.0) <= self.bound.value:
            problems.append(
                f"what it computes afresh agrees ({alignment.mean:.2g}), but the log-probabilities "
                f"of tokens that it samples differ by {alignment.sampled_mean:.4f} on average "
                f"(tolerance {self.bound.value:.2g}). Likely cause: keys and values of the weights "
                "before are still in its KV cache"
            )
        if named != {version}:
            names = ", ".join(str(tuple(v)) for v in sorted(named))
            problems.append(
                f"the server's answer names {names}: look for another trainer that publishes to it"
            )
        return problems

    def _cause(self, served: Tensor, alignment: Alignment) -> str:
        base, previous, mean = mean_distance(served, self._base), alignment.previous, alignment.mean
        if FAR_BETTER * base < mean and base <= previous:
            return "it serves the model that it was started with, without what was trained"
        if FAR_BETTER * previous < mean:
            return "it still serves the weights of the publication before"
        return (
            "it serves weights of another run, or is started with another model than --model-name "
            f"(mean difference to the model it should have been started with: {base:.2g}, to the "
            f"publication before: {previous:.2g})"
        )

    def _sampled_difference(self, completion: Completion) -> Tensor:
        """|server's - trainer's| of what was sampled: [K]"""
        ours = logprobs_of(self._policy, [*self._prompt, *completion.token_ids])
        theirs = torch.tensor(completion.logprobs)
        return (ours[len(self._prompt) - 1 :] - theirs).abs()
