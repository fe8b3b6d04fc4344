"""Advantages of single tokens from a teacher, and the loss with them, by hand; and that their
gradient is that of the reverse KL divergence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch

from grpo_core.tree.objectives import Objective, resolved
from grpo_core.wire.fields import MASKED
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.advantages import with_advantages
from grpo_trainer.checks.groups import GroupCheck
from grpo_trainer.data.collate import Batch, collate
from grpo_trainer.data.groups import Tokens, sequences_of
from grpo_trainer.errors import UnusableGroup
from grpo_trainer.losses import policy_loss
from tests.unit.trainer.groups import (
    LIMITS,
    P,
    batch_of,
    group,
    in_order,
    inputs_of,
    micro_of,
    taught,
    usable,
)

DISTILL = resolved("distill", {})
MIXED = resolved("grpo", {"distill_coef": 0.5, "reward_coef": 2.0})
NEEDS_TEACHER = replace(LIMITS, needs_teacher=True)


def advantages_of(batch: Batch) -> list[list[float]]:
    """Of the trained tokens of each sequence."""
    return [
        row[weight > 0].tolist()
        for micro in batch.micro_batches
        for row, weight in zip(
            micro.advantages.expand_as(micro.targets), micro.token_weight, strict=True
        )
    ]


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (DISTILL, [[-1.0], [0.1, 0.0, -0.5]]),
        (MIXED, [[2 - 0.5], [-2 + 0.05, -2, -2 - 0.25]]),
        (resolved("grpo", {}), [[1.0], [-1.0, -1.0, -1.0]]),
    ],
)
def test_advantages_by_hand(objective: Objective, expected: list[list[float]]) -> None:
    """The scores 1 and 0 have the advantages 1 and -1."""
    found = advantages_of(batch_of(usable(taught(group())), objective))
    assert found == [pytest.approx(row) for row in expected]


def test_distance_from_the_teacher_by_hand() -> None:
    """Over the three tokens with a logprob, of four; those beyond --seq-len count in neither."""
    groups = usable(taught(group()))
    whole, cut = (batch_of(groups, DISTILL, seq_len=length).teacher for length in (100, 3))
    assert whole is not None
    assert cut is not None
    assert (whole.reverse_kl, whole.scored) == (pytest.approx((1.0 - 0.1 + 0.5) / 3), 0.75)
    assert (cut.reverse_kl, cut.scored) == (pytest.approx((1.0 - 0.1) / 2), 1.0)
    assert batch_of(groups, resolved("grpo", {})).teacher is None


def test_an_impossible_token_of_the_teacher_has_a_bounded_advantage() -> None:
    far = taught(
        group(), distill_logprobs=[[[], [], [-9999.0]], [[], [-5.0], [-9.0] * 3, [-9.0], [-0.9]]]
    )
    assert advantages_of(batch_of(usable(far), DISTILL))[0] == [-20.0]


def test_advantages_that_were_sent_or_set_to_zero() -> None:
    sent = taught(group(advantages=[[3.0], [0.0, 0.0, 1.0, 2.0, 4.0]]))
    found = advantages_of(batch_of(usable(sent), MIXED))
    assert found == [pytest.approx([6 - 0.5]), pytest.approx([2 + 0.05, 4, 8 - 0.25])]
    zero = taught(group(overrides=[{}, {"set_advantage_to_zero": True}]))
    batch = batch_of(usable(zero), DISTILL)
    assert advantages_of(batch) == [pytest.approx([-1.0]), [0.0] * 3]
    assert batch.teacher is not None
    assert batch.teacher.scored == 0.75  # the teacher scored them all the same


def test_a_sequence_of_one_token_has_no_teacher() -> None:
    short = group(
        tokens=[[5], [5, 6, 8]],
        masks=[[MASKED], [MASKED, MASKED, 8]],
        inference_logprobs=[[P], [P, P, -0.2]],
        distill_token_ids=[[[]], [[], [], [8]]],
        distill_logprobs=[[[]], [[], [], [-0.1]]],
    )
    assert advantages_of(batch_of(usable(short), DISTILL)) == [[], [pytest.approx(0.1)]]


def test_groups_in_another_order_keep_their_teacher() -> None:
    def backwards(sequences: Sequence[Tokens], size: int) -> list[list[int]]:
        return [part[::-1] for part in in_order(sequences, size)[::-1]]

    nothing: list[list[list[float]]] = [[[]] * 3, [[]] * 5]
    groups = usable(group(distill_token_ids=nothing, distill_logprobs=nothing), taught(group()))
    batch = with_advantages(collate(groups, 100, 2, backwards, DISTILL), DISTILL)
    assert advantages_of(batch) == [pytest.approx(r) for r in ([0.1, 0, -0.5], [-1], [0] * 3, [0])]


def test_loss_and_gradient_by_hand() -> None:
    """Ratios 1 and 2, of two trained tokens: -(1 * -1 * log p + 2 * 0.5 * log p') / 2."""
    logp = torch.tensor([[-0.1, -0.2]], requires_grad=True)
    behaviour = torch.tensor([[-0.1, -0.2 - torch.tensor(2.0).log()]])
    micro = micro_of(behaviour, torch.tensor([[-1.0, 0.5]]), torch.tensor([[0.5, 0.5]]))
    loss = policy_loss(inputs_of(logp, micro, DISTILL), DISTILL)
    assert float(loss.detach()) == pytest.approx(-(0.1 - 2 * 0.5 * 0.2) / 2)
    (gradient,) = torch.autograd.grad(loss, logp)
    assert gradient.tolist() == [pytest.approx([0.5, -0.5])]


def test_the_expected_gradient_is_that_of_the_reverse_kl_divergence() -> None:
    """Over all sequences of two tokens, of a policy whose second token does not depend on the
    first. A token's advantage needs no later tokens' then."""
    student = torch.tensor([[0.2, -0.4, 0.9], [1.0, 0.0, -1.0]], requires_grad=True)
    teacher = torch.tensor([[1.0, 0.0, 0.0], [0.3, 0.2, -0.5]]).log_softmax(-1)
    p = student.log_softmax(-1)
    (expected,) = torch.autograd.grad((p.exp() * (p - teacher)).sum() / 2, student)
    total = torch.zeros(())
    for tokens in product(range(3), repeat=2):
        at = (torch.arange(2), torch.tensor(tokens))
        logp = student.log_softmax(-1)[at][None]
        sampled = logp.detach()
        micro = micro_of(sampled, teacher[at][None] - sampled, torch.full((1, 2), 0.5))
        loss = policy_loss(inputs_of(logp, micro, DISTILL), DISTILL)
        total = total + sampled.sum().exp() * loss
    (found,) = torch.autograd.grad(total, student)
    torch.testing.assert_close(found, expected)


def test_groups_without_a_teacher_are_refused_by_name() -> None:
    assert sequences_of([taught(group())], NEEDS_TEACHER)
    nothing: list[list[list[float]]] = [[[]] * 3, [[]] * 5]
    for without in group(), group(distill_token_ids=nothing, distill_logprobs=nothing):
        with pytest.raises(UnusableGroup, match=r"distill_logprobs; pass --teacher-url") as raised:
            sequences_of([without], NEEDS_TEACHER)
        assert raised.value.reason == "no_teacher_logprobs"


def test_groups_at_another_temperature_than_the_teachers_are_refused() -> None:
    cold = taught(group(overrides=[{}, {"temperature": 0.5}]))
    assert sequences_of([cold], LIMITS)
    with pytest.raises(UnusableGroup, match=r"at temperature 0\.5, but a teacher's") as raised:
        sequences_of([cold], NEEDS_TEACHER)
    assert raised.value.reason == "temperature"


def test_equal_scores_are_no_finding_if_only_the_teacher_counts() -> None:
    batches = [usable(*[taught(group(scores=[1.0, 1.0]))] * 12)] * 4
    for uses_scores in (True, False):
        check = GroupCheck(frozenset(), uses_scores)
        found = [f for groups in batches for f in check.findings(groups, PolicyVersion(0, 0))]
        assert bool(found) == uses_scores
