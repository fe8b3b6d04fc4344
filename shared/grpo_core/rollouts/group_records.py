"""What a scored group alone says of its sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

from grpo_core.rollouts.record import RolloutRecord
from grpo_core.wire.fields import MASKED
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.scored_group import RolloutFacts, ScoredGroup

Versions = tuple[PolicyVersion, PolicyVersion]


def records_of_group(
    step: int, group_index: int, group: ScoredGroup, facts: RolloutFacts | None = None
) -> list[RolloutRecord]:
    """The group's sequences without the values that the trainer computes, which are None. An
    advantage that the environment sent is included.

    Args:
        step: training step, counted from 1
        group_index: index of the group in the batch
        facts: of the group; None to read them from the group
    """
    shared: Mapping[str, Any] = group.group_overrides or {}
    overrides: list[dict[str, Any]] = group.overrides or [{}] * group.size
    versions = (facts or RolloutFacts.of(group)).policy_version
    known: list[Versions] | list[None] = (
        versions if len(versions) == group.size else [None] * group.size
    )
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
            behaviour_logprobs=_behaviour_logprobs(group, index),
            logprobs=None,
            score=group.scores[index],
            parts=_numbers(override.get("reward_parts")),
            reason=_text(override.get("grade_reason")),
            advantage=_advantage(group, index),
            versions=_as_lists(known[index]),
            staleness=None,
            finish_reason=_text(override.get("finish_reason")),
            temperature=_temperature(group, override),
            completion_tokens=len(group.masks[index]) - group.masks[index].count(MASKED),
        )
        for index, override in enumerate(overrides)
    ]


def trained_mask(masks: list[int]) -> list[int]:
    """[T] 1 for each token that is trained on. The first is never: nothing predicts it."""
    found = [0 if mask == MASKED else 1 for mask in masks]
    found[0] = 0
    return found


def _behaviour_logprobs(group: ScoredGroup, index: int) -> list[float]:
    if not group.inference_logprobs:
        return []
    pairs = zip(group.inference_logprobs[index], group.masks[index], strict=True)
    next(pairs)
    return [logp for logp, mask in pairs if mask != MASKED]


def _advantage(group: ScoredGroup, index: int) -> float | None:
    sent = group.advantages[index] if group.advantages else []
    if len(sent) == len(group.tokens[index]):
        masks = group.masks[index]
        sent = [value for value, mask in zip(sent, masks, strict=True) if mask != MASKED]
    return fmean(sent) if sent else None


def _temperature(group: ScoredGroup, override: Mapping[str, Any]) -> float:
    """The sequence's, else the generation parameters', else the group's; 1 if none is given."""
    found = next(_temperatures(group, override), 1.0)
    return float(found) if isinstance(found, int | float) else 1.0


def _temperatures(group: ScoredGroup, override: Mapping[str, Any]) -> Iterator[object]:
    for source in (override, group.generation_params or {}, group.group_overrides or {}):
        if source.get("temperature") is not None:
            yield source["temperature"]


def _as_lists(versions: Versions | None) -> list[list[int]] | None:
    return None if versions is None else [list(version) for version in versions]


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
