"""Collation: the shift, the masks, the weights, and the version of each sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.tree.objectives import GRPO, Objective
from grpo_core.wire.fields import MASKED
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.data.collate import collate
from grpo_trainer.data.cuts import Cut, by_length, by_prefix
from grpo_trainer.model.logprobs import TokenValues
from grpo_trainer.token_table import TokenTable
from tests.unit.trainer.groups import VOCABULARY, P, collated, group, in_order, usable


def test_shift_padding_and_weights_by_hand() -> None:
    micro = collated(group()).micro_batches[0]
    assert micro.inputs.tolist() == [[5, 6, 0, 0], [5, 6, 8, 9]]
    assert micro.targets.tolist() == [[6, 7, 0, 0], [6, 8, 9, 10]]
    torch.testing.assert_close(
        micro.behaviour_logp, torch.tensor([[P, -0.1, P, P], [P, -0.2, -0.3, -0.4]])
    )
    torch.testing.assert_close(
        micro.token_weight, torch.tensor([[0, 1 / 2, 0, 0], [0, 1 / 6, 1 / 6, 1 / 6]])
    )
    assert micro.advantages.flatten().tolist() == pytest.approx([1.0, -1.0])
    assert micro.temperature.tolist() == [1.0, 1.0]
    assert micro.lengths == (2, 4)
    assert micro.shared == (0, 2)


TOKEN = st.tuples(st.integers(0, VOCABULARY - 1), st.booleans(), st.floats(-9, 0, width=32))
"""A token's id, whether it is trained on, and its logprob."""


@st.composite
def any_group(draw: st.DrawFn) -> ScoredGroup:
    """First tokens are never trained on; the second one of the first sequence is."""
    rows = draw(st.lists(st.lists(TOKEN, min_size=2, max_size=7), min_size=1, max_size=4))
    tokens = [[token for token, _, _ in row] for row in rows]
    masks = [[MASKED, *(t if is_on else MASKED for t, is_on, _ in row[1:])] for row in rows]
    masks[0][1] = tokens[0][1]
    return group(
        tokens=tokens,
        masks=masks,
        scores=[float(i) for i in range(len(rows))],
        inference_logprobs=[[logp for _, _, logp in row] for row in rows],
    )


@pytest.mark.parametrize("cut", [by_length, by_prefix, in_order])
@given(st.lists(any_group(), min_size=1, max_size=4), st.integers(2, 8), st.integers(1, 20))
def test_every_trained_token_arrives_once_and_sequences_weigh_the_same(
    cut: Cut, groups: list[ScoredGroup], seq_len: int, tokens: int
) -> None:
    """The weights do not depend on the division into micro-batches, nor on the order."""
    batch = collate(usable(*groups), seq_len, tokens, cut, GRPO)
    sent = [
        [
            (env_id, place, *values)
            for place, values in enumerate(zip(*row, strict=True))
            if place < seq_len
        ]
        for env_id, one in enumerate(groups)
        for row in zip(one.masks, one.inference_logprobs or [], strict=True)
    ]
    trained = [[token for token in row if token[2] != MASKED] for row in sent]

    micro_batches = batch.micro_batches
    targets = [micro.targets.float() for micro in micro_batches]
    table = TokenTable.of(micro_batches, [TokenValues(t, t, t) for t in targets])
    weights = torch.cat([micro.token_weight.sum(-1) for micro in micro_batches]).tolist()
    columns = (table.sequence, table.position, table.logp, table.behaviour_logp)
    found: list[list[tuple[float, ...]]] = [[] for _ in sent]
    for number, *token in zip(*(column.tolist() for column in columns), strict=True):
        sequence = batch.sequences[number]
        found[number].append((sequence.group_index, *token))
        assert sequence.tokens[token[0]] == token[1]
    assert sorted(found) == sorted(trained)
    assert weights == pytest.approx([bool(row) / len(sent) for row in found])


@pytest.mark.parametrize(
    ("objective", "weight"),
    [
        (Objective(aggregation="token"), 1 / 8),
        (Objective(aggregation="constant"), 1 / (4 * 100)),
        (Objective(aggregation="constant", aggregation_tokens=5), 1 / (4 * 5)),
    ],
)
def test_a_weight_counts_the_tokens_and_sequences_of_the_whole_batch(
    objective: Objective, weight: float
) -> None:
    """Two groups of 1 and 3 trained tokens, in micro-batches of one sequence."""
    batch = collate(usable(group(), group()), 100, 1, in_order, objective)
    assert len(batch.micro_batches) == 4
    weights = torch.cat([micro.token_weight.flatten() for micro in batch.micro_batches])
    assert weights[weights > 0].tolist() == pytest.approx([weight] * 8)


def test_overrides_of_one_sequence_leave_the_other_as_it_is() -> None:
    """A sequence with a zeroed advantage still counts in its group's mean."""
    mixed = group(
        overrides=[{"temperature": 2.0}, {"set_advantage_to_zero": True}],
        generation_params={"temperature": 0.5},
    )
    micro = collated(mixed).micro_batches[0]
    assert micro.temperature.tolist() == [2.0, 0.5]
    assert micro.advantages.flatten().tolist() == pytest.approx([1.0, 0.0])


def test_advantages_of_the_environment_have_priority_over_its_scores() -> None:
    """One for a whole sequence, or one for each token, of which the first predicts nothing."""
    sent = group(advantages=[[7.0], [0.0, 1.0, 2.0, 3.0, 4.0]])
    micro = collated(sent, seq_len=4).micro_batches[0]
    assert micro.advantages.tolist() == [[7.0, 7.0, 0.0], [1.0, 2.0, 3.0]]
    whole = collated(group(advantages=[[7.0], [8.0]])).micro_batches[0]
    assert whole.advantages.tolist() == [[7.0], [8.0]]


def test_version_of_each_sequence() -> None:
    """A version counts only if it is given for every sequence and sampled all of it."""
    overrides = {"policy_version": [[[1, 4], [1, 5]], [[1, 5], [1, 5]]]}
    short = {"policy_version": [[[1, 5], [1, 5]]]}
    named = group(env_id=3, group_overrides=overrides)
    batch = collated(group(group_overrides=short), named, micro_batch_size=1)
    assert [(s.group_index, s.version, s.shared_tokens) for s in batch.sequences] == [
        *[(0, None, 2)] * 2,
        (1, None, 2),
        (1, PolicyVersion(1, 5), 2),
    ]


def test_facts_by_hand() -> None:
    overrides = {
        "policy_version": [[[1, 4], [1, 5]], [[1, 3], [1, 3]]],
        "generation_seconds": 0.5,
        "reward_sample": {"sum": 3.0, "count": 4, "parts": {"format": 2.0}},
    }
    sample = {"sum": 5.0, "count": 6, "parts": {"format": 1.5, "length": -3.0}}
    equal = group(scores=[1.0, 1.0], group_overrides={"reward_sample": sample})
    both = group(group_overrides=overrides), equal
    batch = collated(*both, seq_len=4)
    assert batch.tokens == 14
    assert batch.metrics == pytest.approx(
        {
            **{"data/truncated_fraction": 0.5, "rollout/generation_time": 0.5},
            "checks/receipt_fraction": 0.0,
            **{"reward/zero_variance_fraction": 0.5, "reward/mean": 8 / 10},
            **{"reward/part/format": 3.5 / 10, "reward/part/length": -3 / 6},
            **{"reward/std_in_group": (0.5 + 0.0) / 2, "rollout/completion_tokens_mean": 2.0},
        }
    )
    for one, groups in zip(both, ({"groups": 9, "equal_groups": 8}, {"groups": 1}), strict=True):
        one.group_overrides["reward_sample"] |= groups
    counted = collated(*both).metrics["reward/zero_variance_fraction"]
    assert counted == 8 / 10, "those that were dropped count"


def test_keys_with_a_foreign_meaning_are_ignored() -> None:
    """The reward is then the mean score."""
    foreign = {
        "policy_version": [[1, 2]],
        "generation_seconds": "long",
        "reward_sample": {"sum": 1.0, "count": 0},
    }
    batch = collated(group(group_overrides=foreign), group(scores=[1.0, 1.0]))
    assert not any(sequence.versions for sequence in batch.sequences)
    assert batch.metrics["rollout/generation_time"] is None
    assert batch.metrics["reward/mean"] == 0.75
