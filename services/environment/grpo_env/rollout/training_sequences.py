"""Joins prompts and completions into the token, mask and logprob lists of a scored group.

prompt 5 6, completion 90 91 sampled with -0.4, -1.2
tokens              [ 5,    6,    90,   91 ]
masks               [-100, -100,  90,   91 ]
inference_logprobs  [ 1.0,  1.0, -0.4, -1.2]

`grpo_core.wire` explains the fields.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from grpo_core.clients.inference import Completion
from grpo_core.errors import GrpoError
from grpo_core.wire.fields import MASKED, PROMPT_LOGPROB
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.scored_group import PADDING

LOGPROB_SLACK = 1e-6
"""Rounding may report a probability of 1 as a logprob this far above 0."""

PADDING_TOKENS = 2


class MisalignedCompletion(GrpoError):
    """A completion's tokens and logprobs cannot be trained on. The message lists every problem."""


@dataclass
class TrainingSequence:
    """One sequence that grows with a conversation. The lists have one entry per token [T]."""

    tokens: list[int] = field(default_factory=list)
    masks: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled_ids: list[int] = field(default_factory=list)
    """All tokens that the policy sampled."""
    first_version: PolicyVersion | None = None
    last_version: PolicyVersion | None = None
    finish_reason: str = "stop"

    def add_prompt(self, token_ids: Sequence[int]) -> Self:
        """Add tokens that the policy did not sample."""
        self.tokens += token_ids
        self.masks += [MASKED] * len(token_ids)
        self.logprobs += [PROMPT_LOGPROB] * len(token_ids)
        return self

    def add_completion(self, completion: Completion) -> Self:
        """Raises `MisalignedCompletion`."""
        raise_if_misaligned(self.tokens, [completion])
        self.tokens += completion.token_ids
        self.masks += completion.token_ids
        self.logprobs += completion.logprobs
        self.sampled_ids += completion.token_ids
        self.first_version = self.first_version or completion.first_version
        self.last_version = completion.last_version
        self.finish_reason = completion.finish_reason
        return self

    def as_padding(self) -> TrainingSequence:
        """A short sequence on which nothing is trained. It fills up a group whose rollouts have
        different numbers of sequences, because run-api queues groups of one size."""
        padding = TrainingSequence(
            first_version=self.first_version, last_version=self.last_version, finish_reason=PADDING
        )
        return padding.add_prompt(self.tokens[:PADDING_TOKENS])


def sequences_of(
    prompt_ids: Sequence[int], completions: Sequence[Completion]
) -> list[TrainingSequence]:
    """One sequence for each completion of a prompt.

    Raises:
        MisalignedCompletion: empty prompt or completion, lists of different lengths, or a
            logprob that is not a finite number of at most 0.
    """
    raise_if_misaligned(prompt_ids, completions)
    return [TrainingSequence().add_prompt(prompt_ids).add_completion(c) for c in completions]


def wire_fields(sequences: Iterable[TrainingSequence]) -> dict[str, list[list[Any]]]:
    """The fields of a `ScoredGroup` that hold one list [T] per sequence."""
    rows = [*sequences]
    return {
        "tokens": [row.tokens for row in rows],
        "masks": [row.masks for row in rows],
        "inference_logprobs": [row.logprobs for row in rows],
    }


def raise_if_misaligned(prompt_ids: Sequence[int], completions: Sequence[Completion]) -> None:
    problems = [] if prompt_ids else ["the prompt has no tokens"]
    for index, completion in enumerate(completions):
        problems += [f"completion {index}: {problem}" for problem in _problems(completion)]
    if problems:
        raise MisalignedCompletion(
            "vllm-server: /generate sent an answer that cannot be trained on: "
            + "; ".join(problems)
        )


def _problems(completion: Completion) -> list[str]:
    problems = [] if completion.token_ids else ["no tokens"]
    if len(completion.logprobs) != len(completion.token_ids):
        problems.append(
            f"{len(completion.logprobs)} logprobs for {len(completion.token_ids)} tokens"
        )
    problems += [
        f"invalid logprob {logprob} at token {position}"
        for position, logprob in enumerate(completion.logprobs)
        if not (math.isfinite(logprob) and logprob <= LOGPROB_SLACK)
    ]
    return problems
