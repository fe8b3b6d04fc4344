"""Collation: the shift, the masks, the weights, and where sequences come from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_core.wire import MASKED, PolicyVersion
from grpo_trainer.batch import Origin
from tests.unit.trainer.groups import P, collated, group


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
    assert micro.advantages.tolist() == pytest.approx([1.0, -1.0])
    assert micro.temperature.tolist() == [1.0, 1.0]


def test_the_weights_of_a_batch_add_up_to_one_however_it_is_cut() -> None:
    for size in (1, 2, 4, 6):
        batch = collated(group(), group(), group(), micro_batch_size=size)
        total = sum(float(micro.token_weight.sum()) for micro in batch.micro_batches)
        assert total == pytest.approx(1.0)
        assert len(batch.micro_batches) == -(-6 // size)


def test_a_sequence_without_trained_tokens_weighs_nothing() -> None:
    masked = group(masks=[[MASKED] * 3, [MASKED, MASKED, 8, 9, 10]])
    micro = collated(masked).micro_batches[0]
    assert micro.token_weight.sum(-1).tolist() == pytest.approx([0.0, 0.5])


def test_long_sequences_are_cut_and_counted() -> None:
    batch = collated(group(), seq_len=4)
    assert batch.micro_batches[0].inputs.tolist() == [[5, 6, 0], [5, 6, 8]]
    assert batch.micro_batches[0].targets.tolist() == [[6, 7, 0], [6, 8, 9]]
    assert batch.facts.truncated_fraction == 0.5
    assert batch.facts.tokens == 7


def test_each_sequence_keeps_its_own_temperature() -> None:
    mixed = group(overrides=[{"temperature": 2.0}, {}], generation_params={"temperature": 0.5})
    assert collated(mixed).micro_batches[0].temperature.tolist() == [2.0, 0.5]


def test_overrides_can_silence_one_sequence() -> None:
    """The other one keeps what it scored against both, as in the archived trainer."""
    silenced = group(overrides=[{"set_advantage_to_zero": True}, {}])
    micro = collated(silenced).micro_batches[0]
    assert micro.advantages.tolist() == pytest.approx([0.0, -1.0])


@pytest.mark.parametrize("advantages", [[[9.0], [9.0]], [[9.0] * 3, [9.0] * 5], [[], [0.1, 0.2]]])
def test_advantages_follow_from_the_scores_whatever_the_environment_sends(advantages: Any) -> None:
    """As in the archived trainer; their inner lengths are anybody's guess."""
    micro = collated(group(advantages=advantages)).micro_batches[0]
    assert micro.advantages.tolist() == pytest.approx([1.0, -1.0])


def test_where_sequences_come_from() -> None:
    overrides = {"policy_version": [[[1, 4], [1, 5]], [[1, 5], [1, 5]]]}
    named = group(env_id=3, group_overrides=overrides)
    assert collated(group(), named, micro_batch_size=1).origins == [
        Origin(group=0, env_id=None, version=None, siblings=2, shared_tokens=2),
        Origin(group=0, env_id=None, version=None, siblings=2, shared_tokens=2),
        Origin(group=1, env_id=3, version=None, siblings=2, shared_tokens=2),
        Origin(group=1, env_id=3, version=PolicyVersion(1, 5), siblings=2, shared_tokens=2),
    ]


def test_versions_that_are_not_one_per_sequence_say_nothing() -> None:
    short = group(group_overrides={"policy_version": [[[1, 5], [1, 5]]]})
    assert [origin.version for origin in collated(short).origins] == [None, None]


def test_what_completions_share_by_chance_counts_as_shared() -> None:
    alike = group(
        tokens=[[5, 6, 8, 9, 10], [5, 6, 8, 9, 10]],
        masks=[[MASKED, MASKED, 8, 9, 10]] * 2,
        inference_logprobs=[[P, P, -0.2, -0.3, -0.4]] * 2,
    )
    assert {origin.shared_tokens for origin in collated(alike).origins} == {5}


def test_facts_by_hand() -> None:
    overrides = {
        "policy_version": [[[1, 4], [1, 5]], [[1, 3], [1, 3]]],
        "generation_seconds": 0.5,
        "reward_sample": {"sum": 3.0, "count": 4},
    }
    equal = group(scores=[1.0, 1.0], group_overrides={"reward_sample": {"sum": 5.0, "count": 6}})
    facts = collated(group(group_overrides=overrides), equal).facts
    assert facts.tokens == 16
    assert facts.first_versions == [(1, 4), (1, 3)]
    assert facts.generation_s == 0.5
    assert facts.zero_variance_fraction == 0.5
    assert facts.reward_mean == pytest.approx(8 / 10)
    assert facts.reward_std_in_group == pytest.approx((0.5 + 0.0) / 2)
    assert facts.completion_tokens_mean == 2.0


def test_reward_is_the_mean_score_where_the_environment_counts_nothing() -> None:
    assert collated(group(), group(scores=[1.0, 1.0])).facts.reward_mean == 0.75


@pytest.mark.parametrize(
    "foreign",
    [
        {"policy_version": 3},
        {"policy_version": [[1, 2]]},
        {"generation_seconds": "long"},
        {"reward_sample": {"sum": 1.0}},
        {"reward_sample": {"sum": 1.0, "count": 0}},
    ],
)
def test_foreign_meanings_of_our_keys_count_as_not_said(foreign: dict[str, Any]) -> None:
    facts = collated(group(group_overrides=foreign)).facts
    assert facts.first_versions == []
    assert facts.generation_s is None
    assert facts.reward_mean == 0.5


def test_every_tensor_of_a_micro_batch_moves_and_what_is_there_is_not_copied() -> None:
    micro = collated(group()).micro_batches[0]
    moved = vars(micro.to(torch.device("meta")))
    tensors = [name for name, value in vars(micro).items() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 6
    assert {moved[name].device.type for name in tensors} == {"meta"}
    assert moved["lengths"] == micro.lengths == (2, 4)
    stayed = vars(micro.to(torch.device("cpu")))
    assert all(stayed[name] is value for name, value in vars(micro).items())
