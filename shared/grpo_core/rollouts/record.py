"""One sequence of a training step, as files of rollouts hold it.

Legend: T tokens of the sequence, N of them trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
"""Has the keys `role` and `content`; further keys, such as `tool_calls`, are free."""


@dataclass(slots=True, kw_only=True)
class RolloutRecord:
    """One sequence: what was sampled, its reward, and what the trainer computed for it. It is not
    frozen, because that makes its creation several times as slow.

    Args:
        step: training step, counted from 1
        group: index of the group in the batch
        index: index of the sequence in the group
        env_id: id that run-api gave to the environment
        item: hash of the task's item, the same in every step
        messages: the whole conversation, the completion last; empty if the environment sent none
        tokens: [T] prompt and completion, not cut to --seq-len
        mask: [T] 1 if the token is trained on, else 0; tokens beyond --seq-len have 0
        behaviour_logprobs: [N] in order, by the server that sampled the tokens; empty if the
            environment sent none
        logprobs: [N] by the trainer, before the step's update
        score: the reward
        parts: the parts of the reward by name; empty if the environment sent none
        reason: the grader's reason
        advantage: of the sequence: the mean over its trained tokens if they differ
        versions: [[epoch, step], [epoch, step]] of the policy that sampled the first and the last
            token
        staleness: steps between the sampling of the first token and this step's update
        finish_reason: "stop" or "length"
        completion_tokens: tokens that the policy sampled, including those beyond --seq-len

    An optional value is None if it is not known.
    """

    step: int
    group: int
    index: int
    env_id: int | None
    task: str | None
    item: str | None
    messages: list[Message]
    tokens: list[int]
    mask: list[int]
    behaviour_logprobs: list[float]
    logprobs: list[float] | None
    score: float
    parts: dict[str, float]
    reason: str | None
    advantage: float | None
    versions: list[list[int]] | None
    staleness: int | None
    finish_reason: str | None
    temperature: float
    completion_tokens: int

    @property
    def mean_logprob_difference(self) -> float | None:
        """Mean |trainer's logprob - server's logprob| over the trained tokens."""
        if not self.logprobs or len(self.logprobs) != len(self.behaviour_logprobs):
            return None
        pairs = zip(self.logprobs, self.behaviour_logprobs, strict=True)
        return sum(abs(ours - theirs) for ours, theirs in pairs) / len(self.logprobs)
