"""What is refused, under which name, and what is read from the rest."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_core.wire import MASKED, ScoredGroup
from grpo_trainer.errors import UnusableGroup, UnusableReason
from grpo_trainer.group_checks import LOGPROB_SLACK, usable_group
from tests.unit.trainer.groups import VOCABULARY, P, group


def refusal(bad: ScoredGroup) -> UnusableGroup:
    with pytest.raises(UnusableGroup) as refused:
        usable_group(4, bad, VOCABULARY)
    return refused.value


@pytest.mark.parametrize("absent", [None, []])
def test_without_inference_logprobs(absent: Any) -> None:
    error = refusal(group(inference_logprobs=absent, env_id=7))
    assert error.reason is UnusableReason.NO_LOGPROBS
    assert str(error).startswith("GRPO requires inference_logprobs for importance sampling!")
    assert "Group 4 of the batch (env_id 7)" in str(error)


def test_the_prompt_placeholder_at_a_trained_position() -> None:
    error = refusal(group(inference_logprobs=[[P, P, -0.1], [P, P, P, -0.2, -0.3]]))
    assert error.reason is UnusableReason.POSITIVE_LOGPROBS
    assert "group 4, sequence 1: ref_logprobs avg 1.000 (should be negative!)" in str(error)
    assert "at 1 of 3 trained positions" in str(error)


def test_rounding_above_zero_is_no_mistake() -> None:
    usable_group(
        0, group(inference_logprobs=[[P, P, LOGPROB_SLACK], [P, P, 0.0, 0.0, 0.0]]), VOCABULARY
    )


@pytest.mark.parametrize(
    "logprobs", [[[P, P, -0.1], [P, P, -0.2, -0.3, -0.4]], [[-2.0] * 3, [-2.0] * 5]]
)
def test_a_prompt_that_is_not_masked(logprobs: list[list[float]]) -> None:
    """Whatever stands there as logprob: nothing can have predicted the first token."""
    error = refusal(
        group(masks=[[5, MASKED, 7], [MASKED, MASKED, 8, 9, 10]], inference_logprobs=logprobs)
    )
    assert error.reason is UnusableReason.PROMPT_TRAINED
    assert "group 4: the first token of 1 of 2 sequences is trained on" in str(error)


@pytest.mark.parametrize(
    "masks",
    [
        [[MASKED] * 3, [MASKED] * 5],
        [[5, MASKED, MASKED], [MASKED] * 5],
    ],
)
def test_nothing_to_train_on(masks: list[list[int]]) -> None:
    assert refusal(group(masks=masks)).reason is UnusableReason.NOTHING_TRAINED


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [1.0, 1.0]),
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
    assert usable_group(0, group(**changes), VOCABULARY).temperatures == expected


@pytest.mark.parametrize("temperature", [0, -1, "hot", True])
def test_temperatures_without_a_ratio(temperature: Any) -> None:
    error = refusal(group(generation_params={"temperature": temperature}))
    assert error.reason is UnusableReason.TEMPERATURE


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
        error = refusal(group(**place))
        assert error.reason is UnusableReason.SAMPLING
        assert name in str(error)


def test_neutral_sampling_parameters_are_accepted() -> None:
    neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 8, "temperature": 1.0}
    usable_group(0, group(generation_params=neutral), VOCABULARY)


def test_tokens_that_the_policy_does_not_know() -> None:
    error = refusal(
        group(
            tokens=[[5, 6, 7], [5, 6, 8, 9, 100]],
            masks=[[MASKED, MASKED, 7], [MASKED, MASKED, 8, 9, 100]],
        )
    )
    assert error.reason is UnusableReason.UNKNOWN_TOKEN
    assert "group 4, sequence 1: token 100, but the policy knows 100" in str(error)


def test_masks_that_are_shifted_against_the_tokens() -> None:
    error = refusal(group(masks=[[MASKED, 7, MASKED], [MASKED, MASKED, 8, 9, 10]]))
    assert error.reason is UnusableReason.MASKS
    assert "group 4, sequence 0: a mask is neither" in str(error)
