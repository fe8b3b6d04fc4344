"""Collation: the shift, the masks, the weights, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_core.wire import MASKED, PROMPT_LOGPROB, ScoredGroup
from grpo_trainer.batch import Batch, CollationLimits
from grpo_trainer.batch import collate as collate_within
from grpo_trainer.errors import UnusableGroup

P = PROMPT_LOGPROB


def group(**changes: Any) -> ScoredGroup:
    """Prompt 5 6; completions (7) and (8, 9, 10)."""
    fields: dict[str, Any] = {
        "tokens": [[5, 6, 7], [5, 6, 8, 9, 10]],
        "masks": [[MASKED, MASKED, 7], [MASKED, MASKED, 8, 9, 10]],
        "scores": [1.0, 0.0],
        "inference_logprobs": [[P, P, -0.1], [P, P, -0.2, -0.3, -0.4]],
    }
    return ScoredGroup.model_validate(fields | changes)


def collate(groups: list[ScoredGroup], seq_len: int, micro_batch_size: int) -> Batch:
    return collate_within(groups, CollationLimits(seq_len, micro_batch_size, vocab_size=100))


def test_shift_padding_and_weights_by_hand() -> None:
    micro = collate([group()], seq_len=100, micro_batch_size=2).micro_batches[0]
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
    groups = [group(), group(), group()]
    for size in (1, 2, 4, 6):
        batch = collate(groups, seq_len=100, micro_batch_size=size)
        total = sum(float(micro.token_weight.sum()) for micro in batch.micro_batches)
        assert total == pytest.approx(1.0)
        assert len(batch.micro_batches) == -(-6 // size)


def test_a_sequence_without_trained_tokens_weighs_nothing() -> None:
    masked = group(masks=[[MASKED] * 3, [MASKED, MASKED, 8, 9, 10]])
    micro = collate([masked], seq_len=100, micro_batch_size=2).micro_batches[0]
    assert micro.token_weight.sum(-1).tolist() == pytest.approx([0.0, 0.5])


def test_long_sequences_are_cut_and_counted() -> None:
    batch = collate([group()], seq_len=4, micro_batch_size=2)
    assert batch.micro_batches[0].inputs.tolist() == [[5, 6, 0], [5, 6, 8]]
    assert batch.micro_batches[0].targets.tolist() == [[6, 7, 0], [6, 8, 9]]
    assert batch.facts.truncated_sequences == 1
    assert batch.facts.tokens == 7


@pytest.mark.parametrize("absent", [None, []])
def test_groups_without_inference_logprobs_are_refused(absent: Any) -> None:
    with pytest.raises(UnusableGroup, match="GRPO requires inference_logprobs for importance"):
        collate([group(inference_logprobs=absent)], seq_len=100, micro_batch_size=2)


def test_the_prompt_placeholder_at_a_trained_position_is_refused() -> None:
    shifted = [[P, P, P], [P, P, P, -0.2, -0.3]]
    with pytest.raises(UnusableGroup, match="group 0, sequence 0: inference_logprobs above 0"):
        collate([group(inference_logprobs=shifted)], seq_len=100, micro_batch_size=2)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"generation_params": {"temperature": 0.5}}, [0.5, 0.5]),
        ({"group_overrides": {"temperature": 0.7}}, [0.7, 0.7]),
        (
            {
                "overrides": [{"temperature": 2.0}, {}],
                "generation_params": {"temperature": 0.5},
                "group_overrides": {"temperature": 0.7},
            },
            [2.0, 0.5],
        ),
    ],
)
def test_temperature_precedence(changes: dict[str, Any], expected: list[float]) -> None:
    micro = collate([group(**changes)], seq_len=100, micro_batch_size=2).micro_batches[0]
    assert micro.temperature.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("temperature", [0, -1, "hot", True])
def test_temperatures_without_a_ratio_are_refused(temperature: Any) -> None:
    with pytest.raises(UnusableGroup, match="temperature"):
        collate(
            [group(generation_params={"temperature": temperature})],
            seq_len=100,
            micro_batch_size=2,
        )


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_p": 0.9},
        {"top_k": 5},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {"5": 1.0}},
        {"allowed_token_ids": [5]},
    ],
)
def test_sampling_that_renormalises_is_refused_by_name(sampling: dict[str, Any]) -> None:
    (name,) = sampling
    for place in (
        {"generation_params": sampling},
        {"group_overrides": sampling},
        {"overrides": [{}, sampling]},
    ):
        with pytest.raises(UnusableGroup, match=name):
            collate([group(**place)], seq_len=100, micro_batch_size=2)


def test_neutral_sampling_parameters_are_accepted() -> None:
    neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 8, "temperature": 1.0}
    collate([group(generation_params=neutral)], seq_len=100, micro_batch_size=2)


def test_overrides_can_silence_one_sequence() -> None:
    silenced = group(overrides=[{"set_advantage_to_zero": True}, {}])
    micro = collate([silenced], seq_len=100, micro_batch_size=2).micro_batches[0]
    assert micro.advantages.tolist() == pytest.approx([0.0, -1.0])


def test_facts_by_hand() -> None:
    overrides = {
        "policy_version": [[[1, 4], [1, 5]], [[1, 3], [1, 3]]],
        "generation_seconds": 0.5,
        "reward_sample": {"sum": 3.0, "count": 4},
    }
    equal = group(scores=[1.0, 1.0], group_overrides={"reward_sample": {"sum": 5.0, "count": 6}})
    facts = collate([group(group_overrides=overrides), equal], 100, 4).facts
    assert facts.sequences == 4
    assert facts.tokens == 16
    assert facts.first_versions == [(1, 4), (1, 3)]
    assert facts.generate_s == 0.5
    assert facts.zero_variance_fraction == 0.5
    assert facts.reward_mean == pytest.approx(8 / 10)


def test_reward_is_the_mean_score_where_the_environment_counts_nothing() -> None:
    assert collate([group(), group(scores=[1.0, 1.0])], 100, 4).facts.reward_mean == 0.75


def test_tokens_that_the_policy_does_not_know_are_refused() -> None:
    unknown = group(tokens=[[5, 6, 7], [5, 6, 8, 9, 100]], masks=[[MASKED] * 3, [MASKED] * 5])
    with pytest.raises(UnusableGroup, match="group 0, sequence 1: token 100, but the policy knows"):
        collate([unknown], seq_len=100, micro_batch_size=2)


def test_masks_that_are_shifted_against_the_tokens_are_refused() -> None:
    shifted = group(masks=[[MASKED, 7, MASKED], [MASKED, MASKED, 8, 9, 10]])
    with pytest.raises(UnusableGroup, match="group 0, sequence 0: a mask is neither"):
        collate([shifted], seq_len=100, micro_batch_size=2)


def test_sequences_of_one_token_predict_nothing() -> None:
    single = group(tokens=[[5], [6]], masks=[[MASKED], [MASKED]], inference_logprobs=[[P], [P]])
    micro = collate([single], seq_len=100, micro_batch_size=2).micro_batches[0]
    assert micro.inputs.shape == (2, 1)
    assert float(micro.token_weight.sum()) == 0.0


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
    facts = collate([group(group_overrides=foreign)], 100, 2).facts
    assert facts.first_versions == []
    assert facts.generate_s == 0.0
    assert facts.reward_mean == 0.5
