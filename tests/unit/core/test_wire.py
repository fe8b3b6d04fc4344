"""What a scored group may be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from grpo_core.wire import EnvironmentRegistration, ScoredGroup

GROUP: dict[str, Any] = {
    "tokens": [[5, 6, 90], [5, 6, 91]],
    "masks": [[-100, -100, 90], [-100, -100, 91]],
    "scores": [1.0, 0.0],
}


def parse(**changes: Any) -> ScoredGroup:
    return ScoredGroup.model_validate_json(json.dumps(GROUP | changes))


def refusal(**changes: Any) -> list[tuple[tuple[int | str, ...], str]]:
    with pytest.raises(ValidationError) as error:
        parse(**changes)
    return [(problem["loc"], problem["msg"]) for problem in error.value.errors()]


def test_all_fourteen_keys_are_written() -> None:
    assert set(json.loads(parse().model_dump_json())) == {
        "tokens",
        "masks",
        "scores",
        "advantages",
        "ref_logprobs",
        "messages",
        "generation_params",
        "inference_logprobs",
        "overrides",
        "group_overrides",
        "images",
        "env_id",
        "distill_token_ids",
        "distill_logprobs",
    }


def test_numbers_are_coerced_where_nothing_is_lost() -> None:
    group = parse(tokens=[[5.0, "6", 90], [5, 6, 91]], scores=["1", 0])
    assert group.tokens[0] == [5, 6, 90]
    assert group.scores == [1.0, 0.0]


def test_unknown_fields_are_dropped() -> None:
    assert "surprise" not in parse(surprise=1).model_dump()


@pytest.mark.parametrize(
    "absent",
    [
        {"overrides": [], "group_overrides": {}, "messages": [], "inference_logprobs": []},
        {"advantages": [], "ref_logprobs": [], "distill_token_ids": [], "distill_logprobs": []},
        {"advantages": [[0.5], [0.5]]},  # upstream sends one value per sequence
    ],
)
def test_what_upstream_sends_is_accepted(absent: dict[str, Any]) -> None:
    assert parse(**absent).size == 2


@pytest.mark.parametrize(
    ("changes", "location"),
    [
        ({"scores": [1.0, float("nan")]}, ("scores", 1)),
        ({"scores": [float("inf"), 0.0]}, ("scores", 0)),
        ({"inference_logprobs": [[0, 0, 0], [0, 0, float("-inf")]]}, ("inference_logprobs", 1, 2)),
        ({"tokens": [[5, 6, 1.5], [5, 6, 91]]}, ("tokens", 0, 2)),
        ({"tokens": [[5, 6, -1], [5, 6, 91]]}, ("tokens", 0, 2)),
        ({"tokens": [[5, 6, 10**30], [5, 6, 91]]}, ("tokens", 0, 2)),
        ({"masks": None}, ("masks",)),
        ({"env_id": -1}, ("env_id",)),
        ({"messages": [[{"role": "user"}], []]}, ("messages",)),
        ({"distill_logprobs": [[[float("nan")]], [[0.0]]]}, ("distill_logprobs", 0, 0, 0)),
    ],
)
def test_a_bad_value_is_named_by_field_and_index(
    changes: dict[str, Any], location: tuple[int | str, ...]
) -> None:
    assert [where for where, _ in refusal(**changes)] == [location]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"messages": [[{"role": "u", "content": "", "reward": float("nan")}], []]}, "[0][0].rew"),
        ({"group_overrides": {"a": [0, float("inf")]}}, ".a[1]"),
        ({"generation_params": {"t": float("nan")}}, ".t"),
        ({"overrides": [{}, {"x": float("nan")}]}, "[1].x"),
        ({"images": float("nan")}, "value"),
    ],
)
def test_free_form_fields_hold_finite_numbers_too(changes: dict[str, Any], says: str) -> None:
    ((location, message),) = refusal(**changes)
    assert location == tuple(changes)
    assert f"{says}" in message
    assert "finite" in message


def test_every_mismatch_is_in_one_error() -> None:
    ((_, message),) = refusal(
        masks=[[-100, -100], [-100]], scores=[1.0], inference_logprobs=[[0.0, 0.0, 0.0]]
    )
    for part in (
        "scores: 1 entries for 2 sequences",
        "inference_logprobs: 1 entries for 2 sequences",
        "masks[0]: 2 values for 3 tokens",
        "masks[1]: 1 values for 3 tokens",
    ):
        assert part in message


TEACHER: dict[str, Any] = {
    "distill_token_ids": [[[], [7, 8], [90]], [[1], [], [2]]],
    "distill_logprobs": [[[], [-0.1, -2.0], [0.0]], [[-1.0], [], [-2.0]]],
}


def test_a_teachers_choices_may_differ_in_number_by_position() -> None:
    assert parse(**TEACHER).distill_token_ids == TEACHER["distill_token_ids"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"distill_logprobs": None}, "distill_logprobs: absent"),
        ({"distill_token_ids": []}, "distill_token_ids: absent"),
        ({"distill_logprobs": TEACHER["distill_logprobs"][:1]}, "1 entries for 2 sequences"),
        ({"distill_logprobs": [[[], [], []], [[0.0], [], [0.0]]]}, "distill_logprobs[0][1]: 0"),
        ({"distill_token_ids": [[[], [7, 8]], [[1], [], [2]]]}, "distill_token_ids[0]: 2 values"),
    ],
)
def test_a_teachers_token_ids_and_logprobs_belong_together(
    changes: dict[str, Any], says: str
) -> None:
    ((_, message),) = refusal(**TEACHER | changes)
    assert says in message


def test_an_endless_list_of_mismatches_is_cut() -> None:
    many = 10_000
    ((_, message),) = refusal(tokens=[[1]] * many, masks=[[]] * many, scores=[0.0] * many)
    assert message.count("masks[") == 20
    assert message.endswith("and more (the first 20 are listed)")


@pytest.mark.parametrize(
    "changes", [{"tokens": [], "masks": [], "scores": []}, {"tokens": [[], [5]]}]
)
def test_nothing_to_train_on_is_refused(changes: dict[str, Any]) -> None:
    assert refusal(**changes)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), 1e300])
def test_weight_of_an_environment_is_a_share(weight: float) -> None:
    with pytest.raises(ValidationError):
        EnvironmentRegistration(max_token_length=10, desired_name="e", weight=weight, group_size=1)
