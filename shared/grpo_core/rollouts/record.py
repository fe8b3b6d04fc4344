"""One sequence of a training step: its record, made from a scored group, and its text.

Legend: T tokens of the sequence, N of them trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any, TypeVar
from unicodedata import category

from grpo_core.wire.fields import MASKED, TokenId
from grpo_core.wire.scored_group import RolloutFacts, ScoredGroup

T = TypeVar("T")
_JOINERS = "\u200c\u200d"
"""Of letters in Persian and Indic scripts, and of emoji."""

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
        teacher_logprobs: [N] by the teacher, None where it gave none; empty without a teacher
        score: the reward
        parts: the parts of the reward by name; empty if the environment sent none
        reason: the grader's reason
        advantage: of the sequence: the mean over its trained tokens if they differ
        versions: [[epoch, step], [epoch, step]] of the policy that sampled the first and the last
            token
        staleness: steps between the sampling of the first token and this step's update
        finish_reason: "stop" or "length"
        completion_tokens: tokens that the policy sampled, including those beyond --seq-len
        part: [1, 2] if it is the first of two sequences of one rollout; None if it is the only one
        attempts: at the item so far (`tried`), and those that were lost, by reason; empty if none
            was

    An optional value is None if it is not known.
    """

    step: int
    group: int
    index: int
    env_id: int | None
    task: str | None
    item: str | None
    messages: list[Message]
    tokens: list[TokenId]
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
    teacher_logprobs: list[float | None] = field(default_factory=list)
    part: list[int] | None = None
    attempts: dict[str, float] = field(default_factory=dict)

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first trained one."""
        return self.mask.index(1) if 1 in self.mask else len(self.mask)

    @property
    def mean_logprob_difference(self) -> float | None:
        """Mean |trainer's logprob - server's logprob| over the trained tokens."""
        if not self.logprobs or len(self.logprobs) != len(self.behaviour_logprobs):
            return None
        pairs = zip(self.logprobs, self.behaviour_logprobs, strict=True)
        return sum(abs(ours - theirs) for ours, theirs in pairs) / len(self.logprobs)


def records_of_group(step: int, group_index: int, group: ScoredGroup) -> list[RolloutRecord]:
    """The group's sequences without the values that the trainer computes, which are None. An
    advantage that the environment sent is included.

    Args:
        step: training step, counted from 1
        group_index: index of the group in the batch
    """
    shared: Mapping[str, Any] = group.group_overrides or {}
    overrides: list[dict[str, Any]] = group.overrides or [{}] * group.size
    versions = RolloutFacts.of(group).policy_version
    known = [[list(version) for version in both] for both in versions]
    rollouts = group.rollouts
    return [
        RolloutRecord(
            step=step,
            group=group_index,
            index=index,
            env_id=group.env_id,
            task=_text(shared.get("task")),
            item=_text(shared.get("item")),
            messages=group.messages[index] if group.messages else [],
            tokens=group.tokens[index],
            mask=trained_mask(group.masks[index]),
            behaviour_logprobs=_of_trained(group, index, group.inference_logprobs[index])
            if group.inference_logprobs
            else [],
            logprobs=None,
            score=group.scores[index],
            parts=_numbers(override.get("reward_parts")),
            reason=_text(override.get("grade_reason")),
            advantage=_advantage(group, index),
            versions=known[index] if len(known) == group.size else None,
            staleness=None,
            finish_reason=_text(override.get("finish_reason")),
            temperature=_temperature(group, override),
            completion_tokens=len(group.masks[index]) - group.masks[index].count(MASKED),
            teacher_logprobs=_of_trained(group, index, group.teacher_logprobs(index))
            if group.distill_logprobs
            else [],
            part=[rollouts[: index + 1].count(rollouts[index]), several]
            if (several := rollouts.count(rollouts[index])) > 1
            else None,
            attempts=_numbers(shared.get("attempts")),
        )
        for index, override in enumerate(overrides)
    ]


def trained_mask(masks: list[int]) -> list[int]:
    """[T] 1 for each token that is trained on. The first is never: nothing predicts it."""
    found = [0 if mask == MASKED else 1 for mask in masks]
    found[0] = 0
    return found


def _of_trained(group: ScoredGroup, index: int, values: Sequence[T]) -> list[T]:
    """[N] Args: values: [T] of a sequence"""
    pairs = zip(values[1:], group.masks[index][1:], strict=True)
    return [value for value, mask in pairs if mask != MASKED]


def _advantage(group: ScoredGroup, index: int) -> float | None:
    sent = group.advantages[index] if group.advantages else []
    if len(sent) == len(group.tokens[index]):
        masks = group.masks[index]
        sent = [value for value, mask in zip(sent, masks, strict=True) if mask != MASKED]
    return fmean(sent) if sent else None


def _temperature(group: ScoredGroup, override: Mapping[str, Any]) -> float:
    """The sequence's, else the generation parameters', else the group's; 1 if none is given."""
    sources = (override, group.generation_params or {}, group.group_overrides or {})
    given = (source["temperature"] for source in sources if source.get("temperature") is not None)
    found = next(given, 1.0)
    return float(found) if isinstance(found, int | float) else 1.0


def _numbers(parts: object) -> dict[str, float]:
    """Other environments may give these fields another meaning: what is no number is left out."""
    if not isinstance(parts, Mapping):
        return {}
    return {
        str(name): float(value)
        for name, value in parts.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


ASSISTANT = "assistant"


def split_conversation(record: RolloutRecord) -> tuple[list[Message], list[Message]]:
    """The messages of the prompt, which may show examples of answers, and those from the policy's
    first turn on. Both are empty if the environment sent no messages."""
    messages = record.messages
    spoken = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
    turns = max(1, trained_runs(record.mask))
    begin = spoken[-turns:][0] if spoken else len(messages)
    return list(messages[:begin]), list(messages[begin:])


def trained_runs(mask: Sequence[int]) -> int:
    """Number of runs of trained tokens: the policy's turns."""
    return sum(after > before for before, after in pairwise([0, *mask]))


def text_of(messages: Sequence[Message]) -> str:
    """The content of one message; of several, with the role before each."""
    if len(messages) == 1:
        return content_of(messages[0])
    return "\n".join(f"{message['role']}: {content_of(message)}" for message in messages)


def content_of(message: Message) -> str:
    """The text, or JSON of content in parts. Calls of tools follow it."""
    content = message.get("content")
    parts = [content if isinstance(content, str) else json.dumps(content)] if content else []
    if calls := message.get("tool_calls"):
        parts.append(f"tool_calls: {json.dumps(calls)}")
    return "\n".join(parts)


def printable(line: str) -> str:
    """The line for a terminal: what a model or a reward wrote may hold control characters, which
    are shown as their escape sequences. Spaces and joiners of other scripts stay."""
    return "".join(c if _is_shown(c) else c.encode("unicode_escape").decode() for c in line)


def _is_shown(character: str) -> bool:
    is_blank = character in _JOINERS or category(character) == "Zs"
    return is_blank or character.isprintable()
