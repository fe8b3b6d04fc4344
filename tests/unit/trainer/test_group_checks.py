"""Unusable groups are refused under the name of their cause; usable ones are read."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_core.wire import MASKED
from grpo_trainer.errors import UnusableGroup, UnusableReason
from grpo_trainer.group_checks import LOGPROB_SLACK, NEUTRAL_SAMPLING, usable_group
from tests.unit.trainer.groups import VOCABULARY, P, group

MASKED_PROMPTS = [[MASKED, MASKED, 7], [MASKED, MASKED, 8, 9, 10]]


def refusal(**changes: Any) -> UnusableGroup:
    with pytest.raises(UnusableGroup) as refused:
        usable_group(4, group(**changes), VOCABULARY)
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
        "group 4, sequence 1: ref_logprobs avg 1.000 (should be negative!) at 1 of 3 trained",
    ),
    (
        {"masks": [[5, MASKED, 7], MASKED_PROMPTS[1]]},
        UnusableReason.PROMPT_TRAINED,
        "group 4: the first token of 1 of 2 sequences is trained on",
    ),
    ({"masks": [[MASKED] * 3, [MASKED] * 5]}, UnusableReason.NOTHING_TRAINED, "every mask is"),
    (
        {"tokens": [[5, 6, 7], [5, 6, 8, 9, 100]], "masks": [MASKED_PROMPTS[0], [MASKED] * 5]},
        UnusableReason.UNKNOWN_TOKEN,
        "group 4, sequence 1: token 100, but the policy knows 100",
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
        for temperature in (0, "hot")
    ),
]


@pytest.mark.parametrize(("changes", "reason", "told"), REFUSED)
def test_each_cause_is_refused_by_name(
    changes: dict[str, Any], reason: UnusableReason, told: str
) -> None:
    error = refusal(**changes)
    assert error.reason is reason
    assert told in str(error)


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
    assert usable_group(0, accepted, VOCABULARY).inference_logprobs == logprobs


def test_the_nearest_temperature_counts() -> None:
    said: dict[str, Any] = {}
    assert usable_group(0, group(**said), VOCABULARY).temperatures == [1.0, 1.0]
    for place, value, expected in (
        ("group_overrides", {"temperature": 0.7}, [0.7, 0.7]),
        ("generation_params", {"temperature": 0.5}, [0.5, 0.5]),
        ("overrides", [{"temperature": 2.0}, {}], [2.0, 0.5]),
    ):
        said[place] = value
        assert usable_group(0, group(**said), VOCABULARY).temperatures == expected
