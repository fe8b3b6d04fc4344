"""Unusable and stale groups are dropped under the name of the cause; many bad ones end the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from grpo_core.tree.objectives import GRPO
from grpo_core.wire.fields import LOGPROB_SLACK, MASKED
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.receipt import NEUTRAL_SAMPLING
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.checkpoint.store import OpenedEpochs
from grpo_trainer.data.collate import collate
from grpo_trainer.data.filter import (
    REPEAT_EVERY_STEPS,
    WINDOW_BATCHES,
    GroupFilter,
    RecentBatches,
    VersionHistory,
    digest,
)
from grpo_trainer.data.groups import (
    GroupLimits,
    sequences_of,
    usable_sequences,
)
from grpo_trainer.errors import DuplicatedBatch, UnusableGroup, UnusableReason
from tests.unit.trainer.groups import (
    LIMITS,
    VOCABULARY,
    P,
    bad,
    filtered,
    good,
    group,
    in_order,
    sampled_by,
)

MASKED_PROMPTS = [[MASKED, MASKED, 7], [MASKED, MASKED, 8, 9, 10]]


def refusal(**changes: Any) -> UnusableGroup:
    with pytest.raises(UnusableGroup) as refused:
        # unchecked: run-api would refuse some of these groups
        usable_sequences(4, group().model_copy(update=changes), LIMITS)
    return refused.value


REFUSED: list[tuple[dict[str, Any], UnusableReason, str]] = [
    (
        {"inference_logprobs": None, "env_id": 7},
        UnusableReason.NO_LOGPROBS,
        "GRPO requires inference_logprobs for importance sampling!",
    ),
    (
        {"inference_logprobs": [[P, P, -0.1], [P, P, P, -0.2, -0.3]]},
        UnusableReason.POSITIVE_LOGPROBS,
        "group 4, sequence 1: in inference_logprobs, 1 of 3",
    ),
    (
        {"masks": [[5, MASKED, 7], MASKED_PROMPTS[1]]},
        UnusableReason.PROMPT_TRAINED,
        "group 4: in 1 of 2 sequences, the first token",
    ),
    ({"masks": [[MASKED] * 3, [MASKED] * 5]}, UnusableReason.NOTHING_TRAINED, "every mask is"),
    (
        {"tokens": [[5, 6, 7], [5, 6, 8, 9, 100]], "masks": [MASKED_PROMPTS[0], [MASKED] * 5]},
        UnusableReason.UNKNOWN_TOKEN,
        "group 4, sequence 1: token id 100 is outside the policy's vocabulary of 100",
    ),
    (
        {"masks": [[MASKED, 7, MASKED], MASKED_PROMPTS[1]]},
        UnusableReason.MASKS,
        "group 4, sequence 0: a mask is neither",
    ),
    *(
        (
            {"generation_params": {"temperature": temperature}},
            UnusableReason.TEMPERATURE,
            f"temperature {temperature!r}",
        )
        for temperature in (0, "hot", 1e-6, 1e39, 10**400)
    ),
]


@pytest.mark.parametrize(("changes", "reason", "told"), REFUSED)
def test_each_cause_is_refused_by_name(
    changes: dict[str, Any], reason: UnusableReason, told: str
) -> None:
    error = refusal(**changes)
    assert error.reason is reason
    assert told in str(error)


def test_a_group_of_which_seq_len_leaves_no_trained_token_is_refused() -> None:
    assert sequences_of([group()], GroupLimits(VOCABULARY, seq_len=3))
    with pytest.raises(UnusableGroup, match="the first is token 3") as refused:
        sequences_of([group()], GroupLimits(VOCABULARY, seq_len=2))
    assert refused.value.reason is UnusableReason.CUT_OFF


def test_every_sampling_parameter_that_renormalises_is_refused_in_every_place() -> None:
    for name in NEUTRAL_SAMPLING:
        sampling = {name: {"5": 1.0} if name == "logit_bias" else [5] if "_" in name else 0.9}
        for place in (
            {"generation_params": sampling},
            {"group_overrides": sampling},
            {"overrides": [{}, sampling]},
        ):
            error = refusal(**place)
            assert error.reason is UnusableReason.SAMPLING
            assert f"{name}=" in str(error)


def test_neutral_sampling_and_rounding_above_zero_are_accepted() -> None:
    neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 8, "temperature": 1.0}
    logprobs = [[P, P, LOGPROB_SLACK], [P, P, 0.0, 0.0, 0.0]]
    accepted = group(generation_params=neutral, inference_logprobs=logprobs)
    assert [s.behaviour_logp for s in sequences_of([accepted], LIMITS)] == logprobs


def temperatures(one: ScoredGroup) -> list[float]:
    return [sequence.temperature for sequence in sequences_of([one], LIMITS)]


def test_the_nearest_temperature_counts() -> None:
    said: dict[str, Any] = {}
    assert temperatures(group(**said)) == [1.0, 1.0]
    for place, value, expected in (
        ("group_overrides", {"temperature": 0.7}, [0.7, 0.7]),
        ("generation_params", {"temperature": 0.5}, [0.5, 0.5]),
        ("overrides", [{"temperature": 2.0}, {}], [2.0, 0.5]),
    ):
        said[place] = value
        assert temperatures(group(**said)) == expected


def test_bad_groups_are_dropped_counted_and_told_once_per_reason_and_environment() -> None:
    group_filter = GroupFilter(LIMITS)
    with capture_logs() as logs:
        first = filtered(
            group_filter, [good(1), bad(2, env_id=1), good(3), bad(4, env_id=1), good(5)], step=0
        )
        second = filtered(
            group_filter, [good(6), good(7), bad(8, env_id=1), bad(9, env_id=2)], step=1
        )
    for usable, dropped in (first, second):
        assert (len(usable), dropped["unusable"]) == (6 if usable is first[0] else 4, 2)
    told = [(entry["reason"], entry["env_id"]) for entry in logs]
    assert told == [("truncated_sampling", 1), ("truncated_sampling", 2)]
    assert "top_p=0.9" in logs[0]["problem"]


def test_the_third_batch_in_a_row_of_bad_groups_alone_ends_the_run_with_every_reason() -> None:
    without, group_filter = (
        good(2).model_copy(update={"inference_logprobs": None}),
        GroupFilter(LIMITS),
    )
    batches = [[bad(10)], [bad(11)], [good(i) for i in range(20, 30)], [bad(12)], [bad(13)]]
    sizes = [len(filtered(group_filter, batch, step=0)[0]) for batch in batches]
    assert sizes == [0, 0, 20, 0, 0]
    with pytest.raises(UnusableGroup, match="None of the last 3 batches") as refused:
        filtered(group_filter, [without, bad(1), bad(3)], step=1)
    assert refused.value.reason is UnusableReason.NO_LOGPROBS
    assert "no_inference_logprobs 1, truncated_sampling 2" in str(refused.value)


def ten(step: int, unusable: int) -> list[ScoredGroup]:
    return [(bad if i < unusable else good)(10 * step + i) for i in range(10)]


def test_more_than_half_of_five_batches_ends_the_run_and_half_does_not() -> None:
    group_filter, fresh = GroupFilter(LIMITS), GroupFilter(LIMITS)
    for step in range(20):
        filtered(group_filter, ten(step, unusable=5), step)
    with pytest.raises(UnusableGroup, match="of the 50 groups of the last 5 batches"):
        filtered(group_filter, ten(20, unusable=6), 20)
    for step in range(WINDOW_BATCHES - 1):
        filtered(fresh, ten(step, unusable=6), step)
    with pytest.raises(UnusableGroup, match="of the 50 groups of the last 5 batches"):
        filtered(fresh, ten(9, unusable=6), WINDOW_BATCHES)


def test_a_batch_that_comes_again_ends_the_run_in_whatever_order() -> None:
    group_filter = GroupFilter(LIMITS)
    filtered(group_filter, [good(1), good(2)], step=0)
    filtered(group_filter, [good(3), good(4)], step=1)
    with pytest.raises(DuplicatedBatch, match=r"step 2: all 2 groups .* of step 0"):
        filtered(group_filter, [good(2, env_id=9), good(1)], step=2)


def test_single_repeats_are_counted_and_told_now_and_then() -> None:
    group_filter = GroupFilter(LIMITS)
    filtered(group_filter, [good(1), good(2)], step=0)
    filtered(group_filter, [good(3), good(4)], step=1)
    with capture_logs() as logs:
        assert filtered(group_filter, [good(1), good(3)], step=2)[1]["repeated"] == 2
        assert filtered(group_filter, [good(5), good(5), good(6)], step=3)[1]["repeated"] == 1
        assert filtered(group_filter, [good(7), good(8)], step=4)[1]["repeated"] == 0
        later = 2 + REPEAT_EVERY_STEPS
        assert filtered(group_filter, [good(1), good(9)], step=later)[1]["repeated"] == 1
    assert [(entry["groups"], entry["step"]) for entry in logs] == [(2, 2), (1, later)]


def test_groups_that_differ_in_what_was_sampled_are_no_repeats() -> None:
    other_tokens = good(1).model_copy(update={"tokens": [[5, 6, 7], [5, 6, 8, 9, 11]]})
    batches = RecentBatches()
    for step, one in enumerate([good(1), good(1, scores=[0.0, 1.0]), good(2), other_tokens]):
        assert batches.count_repeats([digest(one)], step) == 0


def test_a_lone_group_may_come_twice_once() -> None:
    """An environment may repeat a submission after a lost answer."""
    batches = RecentBatches()
    assert batches.count_repeats([digest(good(1))], step=0) == 0
    assert batches.count_repeats([digest(good(1))], step=1) == 1
    with pytest.raises(DuplicatedBatch):
        batches.count_repeats([digest(good(1))], step=2)


RESUMED = VersionHistory(PolicyVersion(2, 6), begun_as=PolicyVersion(1, 6))
OLD, YOUNG = PolicyVersion(2, 6), PolicyVersion(2, 8)


@pytest.mark.parametrize(
    ("version", "step", "age"),
    [
        ((2, 6), 6, 0),
        ((2, 6), 9, 3),
        ((3, 8), 9, 1),  # the server returned under a new epoch
        ((1, 6), 9, 3),
        ((1, 5), 7, 2),  # the same age as without a restart
        ((1, 8), 9, 5),  # two lost steps, and three of this trainer
    ],
)
def test_the_age_of_a_version(version: tuple[int, int], step: int, age: int) -> None:
    assert RESUMED.age(PolicyVersion(*version), step) == age


def group_filter(max_staleness: int | None) -> GroupFilter:
    return GroupFilter(LIMITS, RESUMED, max_staleness)


@pytest.mark.parametrize(("max_staleness", "stale"), [(None, 0), (0, 2), (2, 1)])
def test_a_group_is_as_old_as_its_oldest_completion(max_staleness: int | None, stale: int) -> None:
    groups = [
        sampled_by(1, (2, 9), (2, 9)),
        sampled_by(2, (2, 9), (2, 8)),
        sampled_by(3, (2, 8), (1, 6)),
        good(4),  # unknown version
    ]
    usable, dropped = filtered(group_filter(max_staleness), groups, step=9)
    assert (len(usable), dropped["stale"]) == (2 * (4 - stale), stale)


def test_a_group_of_weights_that_no_trainer_published_is_dropped(tmp_path: Path) -> None:
    epochs = OpenedEpochs(tmp_path)
    for epoch in (2, 4):
        epochs.open(epoch)
    chosen = GroupFilter(LIMITS, replace(RESUMED, epochs=OpenedEpochs(tmp_path)))
    groups = [
        sampled_by(1, (2, 9), (4, 9)),
        sampled_by(2, (1, 9), (1, 9)),  # of an earlier release
        sampled_by(3, (2, 9), (3, 9)),
        good(4),  # unknown version
    ]
    usable, dropped = filtered(chosen, groups, step=9)
    assert (len(usable), dropped["unusable"]) == (6, 1)


def test_a_group_without_a_version_is_as_old_as_the_one_that_was_served_when_it_came() -> None:
    named = [sampled_by(3, (2, 8), (2, 8)), sampled_by(4, (2, 6), (2, 6))]
    groups = [good(1), good(2), *named, good(5)]
    under = [OLD, YOUNG, OLD, YOUNG, None]  # a version that the group names has priority
    usable, dropped = filtered(group_filter(2), groups, 9, under)
    assert [(s.begun_by, s.version) for s in usable if s.index == 0] == [
        (YOUNG, None),
        ((2, 8), (2, 8)),
        (None, None),
    ]
    assert dropped["stale"] == 2


def test_a_group_that_is_filled_up_keeps_the_versions_of_its_own_completions() -> None:
    padded = sampled_by(1, (2, 9), (2, 8)).model_copy(
        update={"overrides": [{}, {"finish_reason": "padding"}]}
    )
    ((one,), _) = filtered(group_filter(None), [padded], 9)
    assert one.versions == (PolicyVersion(2, 9), PolicyVersion(2, 9))


def test_a_version_of_the_same_weights_before_the_restart_is_the_first_of_this_trainer() -> None:
    (before, _, after, _), _ = filtered(
        group_filter(None), [sampled_by(1, (1, 6), (1, 6)), good(2)], 6, [None, PolicyVersion(1, 6)]
    )
    assert before.versions == (RESUMED.first, RESUMED.first)
    assert after.begun_by == after.received_under == RESUMED.first


def test_a_bound_is_no_version_that_could_be_fresh() -> None:
    """`RolloutCheck` relies on versions: both groups arrived while their weights were served."""
    groups = [good(1), sampled_by(2, (2, 9), (2, 9))]
    usable, _ = filtered(group_filter(None), groups, 9, [PolicyVersion(2, 9)] * 2)
    batch = collate(usable, 100, 2, in_order, GRPO)
    assert [one.version for one in batch.sequences] == [None] * 2 + [PolicyVersion(2, 9)] * 2
    assert [one.begun_by for one in batch.sequences] == [PolicyVersion(2, 9)] * 4
