"""How old groups are, and that old ones are dropped and counted."""

from __future__ import annotations

import pytest

from grpo_core.wire import PolicyVersion, RolloutFacts, ScoredGroup
from grpo_trainer.batch import CollationLimits, collate
from grpo_trainer.intake import Doorkeeper
from grpo_trainer.staleness import Lineage
from tests.unit.trainer.groups import VOCABULARY
from tests.unit.trainer.test_intake import bad, good

RESUMED = Lineage(PolicyVersion(2, 6), begun_as=PolicyVersion(1, 6))


@pytest.mark.parametrize(
    ("version", "step", "age"),
    [
        ((2, 6), 6, 0),
        ((2, 6), 9, 3),
        ((3, 8), 9, 1),  # the server came back under a new epoch
        ((1, 6), 9, 3),
        ((1, 5), 7, 2),  # as it would have been without an end in between
        ((1, 8), 9, 5),  # two steps that are lost, and three of ours
        ((1, 50), 6, 44),
    ],
)
def test_the_age_of_a_version(version: tuple[int, int], step: int, age: int) -> None:
    assert RESUMED.age(PolicyVersion(*version), step) == age


def test_the_name_that_the_server_had_for_our_weights_is_ours() -> None:
    facts = RolloutFacts(policy_version=[((1, 6), (1, 6)), ((1, 5), (1, 6))])
    assert RESUMED.renamed(facts).policy_version == [((2, 6), (2, 6)), ((1, 5), (2, 6))]
    assert Lineage(PolicyVersion(2, 6)).renamed(facts) is facts


def sampled_by(marker: int, *versions: tuple[int, int]) -> ScoredGroup:
    named = [[list(v), list(v)] for v in versions]
    return good(marker, group_overrides={"policy_version": named})


def door(max_staleness: int | None) -> Doorkeeper:
    return Doorkeeper(VOCABULARY, RESUMED, max_staleness)


def test_a_group_is_as_old_as_its_oldest_completion() -> None:
    groups = [
        sampled_by(1, (2, 9), (2, 9)),
        sampled_by(2, (2, 9), (2, 7)),
        sampled_by(3, (2, 8), (1, 6)),
        good(4),  # nobody knows
    ]
    intake = door(2).admit(groups, step=9)
    assert (len(intake.groups), intake.stale_groups) == (3, 1)
    assert door(None).admit(groups, step=9).stale_groups == 0
    assert door(0).admit(groups, step=9).stale_groups == 2


def test_a_batch_of_stale_groups_is_empty_and_no_error() -> None:
    old = [sampled_by(1, (1, 1), (1, 1)), sampled_by(2, (1, 1), (1, 1))]
    intake = door(1).admit(old, step=9)
    assert (intake.groups, intake.stale_groups, intake.unusable_groups) == ([], 2, 0)
    intake = door(1).admit([sampled_by(3, (1, 1), (1, 1)), bad(4)], step=9)
    assert (intake.groups, intake.stale_groups, intake.unusable_groups) == ([], 1, 1)


def test_what_is_admitted_carries_the_name_that_counts_as_fresh() -> None:
    (one,) = door(None).admit([sampled_by(1, (1, 6), (1, 6))], step=6).groups
    assert one.facts.policy_version == [((2, 6), (2, 6))] * 2


OLD, YOUNG = PolicyVersion(2, 6), PolicyVersion(2, 8)


def test_a_group_that_names_no_version_is_as_old_as_what_was_served_when_it_came() -> None:
    groups = [
        good(1),
        good(2),
        sampled_by(3, (2, 8), (2, 8)),
        sampled_by(4, (2, 6), (2, 6)),
        good(5),
    ]
    under = [OLD, YOUNG, OLD, YOUNG, None]  # what a group says itself goes before
    intake = door(2).admit(groups, 9, under)
    assert [one.version_bound for one in intake.groups] == [YOUNG, None, None]
    assert (len(intake.groups), intake.stale_groups) == (3, 2)
    assert door(None).admit(groups, 9, under).stale_groups == 0
    assert door(3).admit(groups, 9, under).stale_groups == 0


def test_versions_that_make_no_sense_are_none() -> None:
    odd = good(1, group_overrides={"policy_version": "main"})
    (one,) = door(None).admit([odd], 9, [YOUNG]).groups
    assert (one.facts.policy_version, one.version_bound) == ([], YOUNG)


def test_a_bound_is_named_as_the_trainer_names_it() -> None:
    (one,) = door(None).admit([good(1)], 6, [PolicyVersion(1, 6)]).groups
    assert one.version_bound == PolicyVersion(2, 6)


def test_a_bound_is_no_version_that_could_be_fresh() -> None:
    """What `RolloutCheck` goes by: the weights of both were served when they came."""
    groups = [good(1), sampled_by(2, (2, 9), (2, 9))]
    intake = door(None).admit(groups, 9, [PolicyVersion(2, 9)] * 2)
    batch = collate(intake.groups, CollationLimits(seq_len=100, micro_batch_size=2))
    assert [origin.version for origin in batch.origins] == [None] * 2 + [PolicyVersion(2, 9)] * 2
    assert batch.facts.first_versions == [PolicyVersion(2, 9)] * 2
    assert batch.facts.version_bounds == [PolicyVersion(2, 9)] * 2
    assert batch.facts.bound_fraction == 0.5
