"""Advantages from scores; and MaxEnt-GRPO's weights: the loss of a batch with them is the mean over
the groups of sum_i w_i (-log p(y_i) / L_i), and its gradient is that of this sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log
from statistics import fmean

import pytest
import torch
from torch import Tensor

from grpo_core.tree.objectives import Objective, resolved
from grpo_core.wire.fields import MASKED
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.advantages import (
    completion_weights,
    entropy_of,
    log_likelihoods,
    with_advantages,
)
from grpo_trainer.data.collate import Batch, collate
from grpo_trainer.data.groups import UsableSequence
from grpo_trainer.learner import accumulate_gradients
from grpo_trainer.model.forward import plain_forward
from tests.unit.trainer.forward_rig import qwen
from tests.unit.trainer.groups import P, batch_of, collated, group, usable

OBJECTIVE = resolved("maxent", {"maxent_tau": 0.3, "kl_coef": 0.2})
WITHOUT_PRIOR = replace(OBJECTIVE, kl_in="loss")


def three(**changes: object) -> ScoredGroup:
    """Completions (7), (8, 9, 10) and (11, 12) with scores 1, 0 and 0.5."""
    fields: dict[str, object] = {
        "tokens": [[5, 6, 7], [5, 6, 8, 9, 10], [5, 6, 11, 12]],
        "masks": [[-100, -100, 7], [-100, -100, 8, 9, 10], [-100, -100, 11, 12]],
        "scores": [1.0, 0.0, 0.5],
        "inference_logprobs": [[P, P, -0.1], [P, P, -0.2, -0.3, -0.4], [P, P, -0.5, -0.6]],
    }
    return group(**fields | changes)


def weighted_batch(
    sequences: Sequence[UsableSequence], objective: Objective = OBJECTIVE
) -> tuple[Batch, Tensor]:
    """Micro-batches of two sequences, in another order; and log-likelihoods of a reference."""

    def backwards(sequences: Sequence[list[int]], size: int) -> list[list[int]]:
        numbers = list(range(len(sequences)))[::-1]
        return [numbers[start : start + size] for start in numbers[::-1][::size]]

    batch = collate(sequences, 100, 2, backwards, objective)
    generator = torch.Generator().manual_seed(1)
    known = [
        replace(m, reference_logp=-torch.rand(m.targets.shape, generator=generator))
        for m in batch.micro_batches
    ]
    batch = replace(batch, micro_batches=known)
    return with_advantages(batch, objective), log_likelihoods(batch)


def advantages_of(batch: Batch) -> list[float]:
    """Of each sequence, in the order of the groups."""
    rows = [micro.advantages.flatten() for micro in batch.micro_batches]
    found: list[float] = batch.in_group_order(rows).tolist()
    return found


def by_sequence(batch: Batch, values: Sequence[Tensor]) -> list[Tensor]:
    """Args: values: [B, T] of each micro-batch. Returns [L] of each sequence, in group order."""
    rows = [
        value[row][micro.token_weight[row] > 0]
        for micro, value in zip(batch.micro_batches, values, strict=True)
        for row in range(len(micro.lengths))
    ]
    return [rows[batch.order.index(number)] for number in range(len(rows))]


@pytest.mark.parametrize("normalize", [True, False])
def test_loss_and_gradient_are_those_of_the_written_out_sum(normalize: bool) -> None:
    objective = replace(OBJECTIVE, maxent_length_normalize_ref=normalize)
    groups, policy = (three(), group()), qwen()
    batch, _ = weighted_batch(usable(*groups), objective)

    references = [m.reference_logp for m in batch.micro_batches if m.reference_logp is not None]
    sums = [row.sum() / (len(row) if normalize else 1) for row in by_sequence(batch, references)]
    scores = [torch.tensor(one.scores) for one in groups]
    priors = torch.stack(sums).split([3, 2])
    weights = [
        completion_weights(score, reference, objective, 0.2)
        for score, reference in zip(scores, priors, strict=True)
    ]
    assert batch.weights_entropy == pytest.approx(fmean(map(entropy_of, weights)))

    logp = [plain_forward(policy, micro).logp for micro in batch.micro_batches]
    likelihoods = torch.stack([row.mean() for row in by_sequence(batch, logp)]).split([3, 2])
    total = -sum(
        ((w * mean).sum() for w, mean in zip(weights, likelihoods, strict=True)), torch.zeros(())
    )
    (expected,) = torch.autograd.grad(total / 2, policy.lm_head.weight)
    found = accumulate_gradients(policy, batch, objective, 0)
    assert found.loss == pytest.approx(float(total.detach()) / 2, rel=1e-5)
    torch.testing.assert_close(policy.lm_head.weight.grad, expected, rtol=1e-4, atol=1e-6)


def test_the_sequences_of_a_rollout_share_its_weight_by_their_tokens() -> None:
    """Rollout 0 has the sequences of 1 and 3 tokens, rollout 1 that of 2."""
    overrides = [{"rollout_index": 0}, {"rollout_index": 0}, {"rollout_index": 1}]
    groups = usable(three(overrides=overrides, scores=[1.0, 1.0, 0.0]))
    batch, _ = weighted_batch(groups, WITHOUT_PRIOR)
    whole = completion_weights(torch.tensor([1.0, 0.0]), torch.zeros(2), OBJECTIVE, 0.0)
    expected = [whole[0] / 4, whole[0] * 3 / 4, whole[1]]
    assert advantages_of(batch) == pytest.approx([3 * float(w) for w in expected])


def test_groups_of_equal_scores_are_trained_on_and_sent_advantages_stay() -> None:
    equal, sent = group(scores=[1.0, 1.0]), group(advantages=[[5.0], [6.0]])
    batch, _ = weighted_batch(usable(equal, sent), WITHOUT_PRIOR)
    assert advantages_of(batch) == pytest.approx([1.0, 1.0, 5.0, 6.0])
    assert batch.weights_entropy == pytest.approx(log(2))  # of the first group
    assert weighted_batch(usable(sent))[0].weights_entropy is None


@pytest.mark.parametrize(
    "changes",
    [
        {"masks": [[-100] * 3, [-100, -100, 8, 9, 10], [-100, -100, 11, 12]]},
        {"overrides": [{"set_advantage_to_zero": True}, {}, {}]},
    ],
)
def test_what_is_not_trained_has_no_share(changes: dict[str, object]) -> None:
    """The first sequence has the best score."""
    groups = usable(three(**changes))
    batch, prior = weighted_batch(groups)
    scores, means = torch.tensor([0.0, 0.5]), prior[1:] / torch.tensor([3, 2])
    expected = completion_weights(scores, means, OBJECTIVE, 0.2)
    assert advantages_of(batch) == pytest.approx([0, *(3 * expected).tolist()])


def test_advantages_of_the_environment_do_not_count_in_the_deviation_of_others() -> None:
    sent = group(advantages=[[7.0], [8.0]], scores=[90.0, 10.0])
    objective = Objective(advantage="batch_std")
    batch = batch_of(usable(group(), sent), objective)
    assert advantages_of(batch) == pytest.approx([1.0, -1.0, 7.0, 8.0])


def test_a_rollout_with_several_sequences_counts_once_and_padding_not_at_all() -> None:
    """Two rollouts with scores 1 and 0 have the advantages 1 and -1. As three sequences with scores
    1, 1 and 0, they would have 0.71 and -1.41."""
    rows = [[5, 6, 7], [5, 8, 9], [5, 6, 10], [5, 6]]
    three = group(
        tokens=rows,
        masks=[[MASKED, *row[1:]] for row in rows[:3]] + [[MASKED, MASKED]],
        inference_logprobs=[[P, -0.1, -0.1]] * 3 + [[P, P]],
        scores=[1.0, 1.0, 0.0, 0.0],
        overrides=[
            {"rollout_index": 0},
            {"rollout_index": 0},
            {"rollout_index": 1},
            {"rollout_index": 1, "finish_reason": "padding"},
        ],
        group_overrides={"policy_version": [[[0, 0], [0, 0]]] * 4},
    )
    batch = collated(three)
    assert advantages_of(batch) == pytest.approx([1.0, 1.0, -1.0])
    weights = torch.cat([micro.token_weight.sum(-1) for micro in batch.micro_batches])
    assert weights.tolist() == pytest.approx([1 / 3] * 3)
    assert [s.versions for s in batch.sequences] == [(PolicyVersion(0, 0),) * 2] * 3


def test_a_long_completion_loses_part_of_its_score() -> None:
    """3 of 4 allowed tokens, and a buffer of 2 tokens: half a point. Then 1 and -0.5 are compared
    with their mean."""
    one = group(generation_params={"max_tokens": 4})
    objective = Objective(advantage="group_mean", overlong_buffer=0.5)
    assert advantages_of(batch_of(usable(one), objective)) == [0.75, -0.75]
