"""Builds the scored group that an environment submits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from grpo_core.wire.scored_group import ROLLOUT, RolloutFacts, ScoredGroup
from grpo_env.rollout.grading import Grade
from grpo_env.rollout.outcome import STOPPED, Sample, SamplingPlan
from grpo_env.rollout.training_sequences import TrainingSequence, wire_fields
from grpo_env.tasks import Message
from grpo_env.tasks.items import Item


def scored_group(
    item: Item,
    samples: Sequence[Sample],
    grades: Sequence[Grade],
    plan: SamplingPlan,
    seconds: float,
) -> ScoredGroup:
    """The group without the environment's id.

    Every rollout has `plan.max_sequences` sequences, all with the rollout's score; those that it
    lacks are padding.

    Args: seconds: that the sampling took
    """
    rows = [*_rows(samples, grades, plan)]
    facts = RolloutFacts(
        policy_version=[(s.first_version, s.last_version) for s, *_ in rows],
        generation_seconds=seconds,
    )
    params: dict[str, Any] = {**plan.sampling}
    if not item.task.is_conversation and not item.task.drives_itself:
        params["max_tokens"] = samples[0].answer.max_tokens
    return ScoredGroup(
        **wire_fields(sequence for sequence, *_ in rows),
        scores=[score for *_, score, _ in rows],
        messages=[[*map(dict, messages)] for _, messages, *_ in rows],
        overrides=[override for *_, override in rows],
        generation_params=params,
        group_overrides=facts.on_the_wire() | {"task": item.task.name, "item": item.key},
    )


def _rows(
    samples: Sequence[Sample], grades: Sequence[Grade], plan: SamplingPlan
) -> Iterator[tuple[TrainingSequence, list[Message], float, dict[str, Any]]]:
    for index, (sample, grade) in enumerate(zip(samples, grades, strict=True)):
        missing = plan.max_sequences - len(sample.sequences)
        padding = [sample.sequences[0].as_padding()] * missing
        messages: list[list[Message]] = [*sample.messages, *([[]] * missing)]
        for sequence, conversation in zip([*sample.sequences, *padding], messages, strict=True):
            yield sequence, conversation, grade.score, _override(index, sequence, grade, plan)


def _override(
    rollout: int, sequence: TrainingSequence, grade: Grade, plan: SamplingPlan
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "reward_parts": dict(grade.parts),
        "finish_reason": sequence.finish_reason,
        ROLLOUT: rollout,
    }
    if grade.reason:
        found["grade_reason"] = grade.reason
    if plan.mask_cut_off and sequence.finish_reason != STOPPED:
        found["set_advantage_to_zero"] = True
    return found
