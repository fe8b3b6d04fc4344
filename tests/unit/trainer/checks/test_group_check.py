"""Each fault that groups show by themselves is named, and honest groups are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from grpo_core.wire.fields import MASKED, PROMPT_LOGPROB
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.checks.findings import CheckName, Finding, FindingLog, RangeWatch
from grpo_trainer.checks.groups import GroupCheck
from grpo_trainer.data.groups import GroupLimits, sequences_of
from grpo_trainer.errors import UnusableGroup, UnusableReason

END, PAD = 90, 91
LIMITS = GroupLimits(100, seq_len=100, end_tokens=frozenset([END]))
HELD = PolicyVersion(1, 5)
PROMPT = [5, END, 6]
ANSWERS = [[7, END], [8, END], [8, 9, END], [7, 8, 9, 10]]
"""The last one reaches the limit of four tokens."""


def group(answers: Sequence[list[int]] = ANSWERS, masked: int = 0, **changes: Any) -> ScoredGroup:
    """Args: masked: number of tokens at the end of each answer that are not trained on"""
    tokens = [PROMPT + answer for answer in answers]
    ends = [len(row) - masked for row in tokens]
    fields: dict[str, Any] = {
        "tokens": tokens,
        "masks": [
            [MASKED] * 3 + row[3:end] + [MASKED] * masked
            for row, end in zip(tokens, ends, strict=True)
        ],
        "inference_logprobs": [[PROMPT_LOGPROB] * 3 + [-0.5] * len(a) for a in answers],
        "scores": [1.0, 0.0, 1.0, 0.0],
        "generation_params": {"max_tokens": 4},
        "group_overrides": {"policy_version": [[[1, 4], [1, 5]]] * 4},
    }
    return ScoredGroup.model_validate(fields | changes)


def found(*batches: list[ScoredGroup]) -> list[str]:
    """Names of the findings in the last batch."""
    check, names = GroupCheck(LIMITS.end_tokens), []
    for groups in batches:
        usable = sequences_of(groups, LIMITS)
        names = [str(finding.check) for finding in check.findings(usable, HELD)]
    return names


def test_nothing_is_said_of_honest_groups() -> None:
    assert found(*[[group()] * 16] * 20) == []


def of_two_rollouts(*answers: list[int], scores: list[float]) -> list[ScoredGroup]:
    """Each rollout has two sequences."""
    numbers = [{"rollout_index": number} for number in (0, 0, 1, 1)]
    return [group(answers, scores=scores, overrides=numbers)] * 4


def test_rollouts_are_compared_with_all_their_sequences() -> None:
    scores = [1.0, 1.0, 0.0, 0.0]
    other = of_two_rollouts([7, END], [8, END], [7, END], [9, END], scores=scores)
    assert found(*[other] * 10) == []
    same = of_two_rollouts([7, END], [8, END], [7, END], [8, END], scores=scores)
    assert found(*[same] * 10) == [CheckName.INCONSISTENT_SCORES]


FAULTS = {
    CheckName.END_TOKEN_MASKED: group([[7, END], [8, END], [8, 9, END], [9, END]], masked=1),
    CheckName.VERSION_AHEAD: group(group_overrides={"policy_version": [[[1, 5], [1, 6]]] * 4}),
    CheckName.INCONSISTENT_SCORES: group([[7, END], [7, END], [8, END], [8, END]]),
    CheckName.UNFINISHED_SCORED: group(scores=[1.0, 0.0, 0.0, 1.0]),
    CheckName.EQUAL_SCORES: group(scores=[0.5] * 4),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_within_ten_batches(name: CheckName) -> None:
    honest, faulty = [group()] * 4, [FAULTS[name]] * 4
    assert name in found(*[honest] * 3, *[faulty] * 10)


def test_a_reward_that_is_the_same_for_all_completions_is_named_after_three_batches() -> None:
    flat = [group(scores=[0.0] * 4)]
    assert found(flat, flat) == []
    assert found(flat, flat, flat) == [CheckName.EQUAL_SCORES]
    assert found(flat, flat, flat, flat) == []
    assert found(flat, flat, [group(scores=[0.0, 0.0, 0.0, 0.1])]) == []
    other = [group(scores=[1.0] * 4)]  # equal within each group, as for easy and hard prompts
    assert found(flat, other, flat) == []


def test_equal_scores_of_several_values_are_named_early() -> None:
    """As the mean of each group's scores in place of the scores."""
    answers = [[7 + i, END] for i in range(8)]
    several = [
        group(answers, scores=[score] * 8, group_overrides=None) for score in (0.0, 0.25, 0.75, 1.0)
    ]
    assert found([group()], *[several] * 3) == []
    assert found([group()], *[several] * 4) == [CheckName.EQUAL_SCORES]
    assert found([group()], *[several] * 3, [*several[:3], group()]) == []
    hard_and_easy = [several[0], several[3]] * 2
    assert found([group()], *[hard_and_easy] * 4) == []
    of_two = [group(answers[:2], scores=[s] * 2, group_overrides=None) for s in (0, 0.25, 1)] * 2
    assert found([group()], *[of_two] * 5) == []


def late(*steps: int) -> list[Finding]:
    """Findings in a batch for each step that stated the version of that step when Redis had
    recorded the previous one, and the version of the next step when it was recorded."""
    check = GroupCheck(LIMITS.end_tokens)
    names: list[Finding] = []
    for step in range(1, 9):
        stated = {"policy_version": [[[1, step], [1, step]]] * 4}
        usable = sequences_of([group(group_overrides=stated)], LIMITS)
        under = PolicyVersion(1, step - (step in steps))
        batch = [replace(sequence, received_under=under) for sequence in usable]
        names += check.findings(batch, PolicyVersion(1, 9))
    return names


def test_a_version_that_redis_learned_late_is_not_ahead_but_one_that_is_always_ahead_is() -> None:
    assert late(2, 3, 4, 8) == []
    one, *_ = late(*range(1, 9))
    assert one.check is CheckName.VERSION_AHEAD
    assert "4 completions" in one.reason
    assert "(1, 5) when (1, 4) was served" in one.reason


HONEST = {
    "all scores are equal": group(scores=[0.0] * 4, generation_params={"max_tokens": 1}),
    "process rewards": group(scores=[0.0] * 4, advantages=[[0.5]] * 4),
    "an end token added to a cut completion": group(
        [[7, END], [8, END], [8, 9, END], [7, 8, 9, END]],
        masks=[[MASKED] * 3 + row for row in ([7, END], [8, END], [8, 9, END], [7, 8, 9, MASKED])],
    ),
    "two turns, each below the limit": group(
        [[7, 8, END, 6, 9, 10, END]] * 4,
        masks=[[MASKED] * 3 + [7, 8, END, MASKED, 9, 10, END]] * 4,
        scores=[1.0] * 4,
    ),
    "one score for equal completions": group([[7, END]] * 4, scores=[1.0] * 4),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_groups_that_look_like_a_fault_pass(name: str) -> None:
    assert found(*[[HONEST[name]] * 4] * 7) == []


@pytest.mark.parametrize(
    ("answers", "changes", "reason"),
    [
        ([[7, END, PAD], [8, END, PAD]], {}, UnusableReason.TRAINED_AFTER_END),
        ([[7, END, PAD], [8, END, PAD]], {"generation_params": {"ignore_eos": True}}, None),
        ([[7, END], [8, END]], {"masks": [[MASKED, END, 6, n, END] for n in (7, 8)]}, "prompt"),
        ([[7, END], [8, END]], {}, None),
    ],
)
def test_a_token_after_a_trained_end_token_is_padding_or_prompt(
    answers: list[list[int]], changes: dict[str, Any], reason: str | None
) -> None:
    one = group(answers, **{"scores": [1.0, 0.0], "group_overrides": None} | changes)
    if reason is None:
        sequences_of([one], LIMITS)
        return
    with pytest.raises(UnusableGroup) as refused:
        sequences_of([one], LIMITS)
    expected = UnusableReason.PROMPT_TRAINED if reason == "prompt" else reason
    assert refused.value.reason == expected


def test_a_finding_is_logged_once_in_fifty_steps_and_counted_every_time() -> None:
    check, log = GroupCheck(LIMITS.end_tokens), FindingLog()
    usable = sequences_of([FAULTS[CheckName.END_TOKEN_MASKED]], LIMITS)
    with capture_logs() as logs:
        counts = [log.report(check.findings(usable, HELD), step) for step in range(51)]
    assert counts == [1] * 51
    assert [entry["step"] for entry in logs] == [0, 50]


def warned_at(values: list[float]) -> list[int]:
    """Steps with a warning, for the clipped fraction at each step."""
    watch = RangeWatch()
    with capture_logs() as logs:
        for step, value in enumerate(values):
            watch.look({"step": step, "grpo/clipped_fraction": value})
    return [entry["step"] for entry in logs]


def test_a_metric_is_reported_after_three_steps_in_a_row_and_then_every_fifty() -> None:
    assert warned_at([0.9, 0.9, 0.1, 0.9, 0.9, 0.1]) == []
    assert warned_at([0.9] * 60) == [2, 52]
