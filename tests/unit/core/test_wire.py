"""Valid scored groups and batches are accepted; the others are rejected with a reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from grpo_core.clients.run_api import LeasedBatch, leased_batch
from grpo_core.errors import ProtocolViolation
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.run_api import EnvironmentCount, EnvironmentRegistration
from grpo_core.wire.scored_group import ScoredGroup

GROUP: dict[str, Any] = {
    "tokens": [[5, 6, 90], [5, 6, 91]],
    "masks": [[-100, -100, 90], [-100, -100, 91]],
    "scores": [1.0, 0.0],
}
ALL_KEYS = {
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages"),
    *("generation_params", "inference_logprobs", "overrides", "group_overrides", "images"),
    *("env_id", "distill_token_ids", "distill_logprobs"),
}
NAN, INFINITY = float("nan"), float("inf")


def parse(**changes: Any) -> ScoredGroup:
    return ScoredGroup.model_validate_json(json.dumps(GROUP | changes))


def refusal(**changes: Any) -> tuple[tuple[int | str, ...], str]:
    """Place and message of the only problem."""
    with pytest.raises(ValidationError) as error:
        parse(**changes)
    (problem,) = error.value.errors()
    return problem["loc"], problem["msg"]


def test_all_fourteen_keys_are_written_and_no_others() -> None:
    assert set(json.loads(parse(surprise=1).model_dump_json())) == ALL_KEYS


def test_numbers_may_be_texts_or_whole_fractions() -> None:
    sent = {"tokens": [[5.0, "6", 90], [5, 6, 91]], "masks": [["-100", -100.0, 90], [-100, 6, 91]]}
    assert parse(**sent, scores=["1.5", 2], env_id="3") == parse(
        masks=[[-100, -100, 90], [-100, 6, 91]], scores=[1.5, 2.0], env_id=3
    )


@pytest.mark.parametrize(
    "absent",
    [
        {"overrides": [], "group_overrides": {}, "messages": [], "inference_logprobs": []},
        {"advantages": [], "ref_logprobs": [], "distill_token_ids": [], "distill_logprobs": []},
        {"advantages": [[0.5], [0.5]]},  # Atropos sends one value per sequence
    ],
)
def test_groups_as_upstream_sends_them_are_valid(absent: dict[str, Any]) -> None:
    assert parse(**absent).size == 2


@pytest.mark.parametrize(
    ("changes", "location"),
    [
        ({"scores": [1.0, NAN]}, ("scores", 1)),
        ({"scores": [INFINITY, 0.0]}, ("scores", 0)),
        ({"inference_logprobs": [[0, 0, 0], [0, 0, -INFINITY]]}, ("inference_logprobs", 1, 2)),
        ({"advantages": [[NAN], [0.0]]}, ("advantages", 0, 0)),
        ({"distill_logprobs": [[[NAN]], [[0.0]]]}, ("distill_logprobs", 0, 0, 0)),
        ({"scores": [1.0, -3.5e38]}, ("scores", 1)),
        ({"inference_logprobs": [[0, 0, 0], [0, 0, "-1e39"]]}, ("inference_logprobs", 1, 2)),
        ({"advantages": [[10**400], [0.0]]}, ("advantages", 0, 0)),
        ({"tokens": [[5, 6, 1.5], [5, 6, 91]]}, ("tokens", 0, 2)),
        ({"tokens": [[5, 6, -1], [5, 6, 91]]}, ("tokens", 0, 2)),
        ({"masks": [[-101, 6, 90], [-100, 6, 91]]}, ("masks", 0, 0)),
        ({"masks": None}, ("masks",)),
        ({"env_id": -1}, ("env_id",)),
        ({"messages": [[{"role": "user"}], []]}, ("messages",)),
    ],
)
def test_a_bad_value_is_named_by_field_and_index(
    changes: dict[str, Any], location: tuple[int | str, ...]
) -> None:
    assert refusal(**changes)[0] == location


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"messages": [[{"role": "u", "content": "", "reward": NAN}], []]}, "[0][0].rew"),
        ({"group_overrides": {"a": [0, INFINITY]}}, ".a[1]"),
        ({"images": [10**400]}, "[0]"),
    ],
)
def test_free_form_fields_hold_finite_numbers_too(changes: dict[str, Any], says: str) -> None:
    location, message = refusal(**changes)
    assert location == tuple(changes)
    assert f"{says}" in message
    assert "finite" in message


@pytest.mark.parametrize("temperature", [3.5e38, -1e39, 10**39, 1e-31])
def test_a_temperature_is_one_that_float32_can_divide_by(temperature: float) -> None:
    says = {"temperature": temperature}
    for changes in ({"generation_params": says}, {"group_overrides": says}):
        location, message = refusal(**changes)
        assert location == tuple(changes)
        assert message.startswith("Value error, temperature")
    assert "[1].temperature" in refusal(overrides=[{}, says])[1]
    assert parse(overrides=[{"temperature": 0}, {"temperature": "hot"}]).size == 2


TEACHER: dict[str, Any] = {
    "distill_token_ids": [[[], [7, 8], [90]], [[1], [], [2]]],
    "distill_logprobs": [[[], [-0.1, -2.0], [0.0]], [[-1.0], [], [-2.0]]],
}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        *(
            ({name: [[0.0] * 3]}, f"{name}: 1 entries for 2 sequences")
            for name in ("advantages", "ref_logprobs", "inference_logprobs")
        ),
        ({"messages": [[]]}, "messages: 1 entries for 2 sequences"),
        ({"overrides": [{}]}, "overrides: 1 entries for 2 sequences"),
        ({"tokens": [], "masks": [], "scores": []}, "at least one sequence"),
        ({"tokens": [[], [5]], "masks": [[], [5]]}, "tokens[0]: empty sequence"),
        (TEACHER | {"distill_logprobs": None}, "distill_logprobs: absent"),
        (
            TEACHER | {"distill_logprobs": [[[], [], []], [[0.0], [], [0.0]]]},
            "distill_logprobs[0][1]: 0 values for 2 token ids",
        ),
        (
            TEACHER | {"distill_token_ids": [[[], [7, 8]], [[1], [], [2]]]},
            "distill_token_ids[0]: 2 values for 3 tokens",
        ),
    ],
)
def test_lengths_that_disagree_are_refused(changes: dict[str, Any], says: str) -> None:
    assert says in refusal(**changes)[1]


def test_every_mismatch_is_in_one_error() -> None:
    _, message = refusal(
        masks=[[-100, -100], [-100]], scores=[1.0], inference_logprobs=[[0.0, 0.0, 0.0]]
    )
    for part in (
        "scores: 1 entries for 2 sequences",
        "inference_logprobs: 1 entries for 2 sequences",
        "masks[0]: 2 values for 3 tokens",
        "masks[1]: 1 values for 3 tokens",
    ):
        assert part in message


@pytest.mark.parametrize("weight", [-0.5, -2, NAN, INFINITY, 1e300])
def test_weight_of_an_environment_is_a_share(weight: float) -> None:
    with pytest.raises(ValidationError):
        EnvironmentRegistration(max_token_length=10, desired_name="e", weight=weight, group_size=1)


POLLED = {"batch_id": 4, "received_under": [[1, 7], None], "batch": [GROUP] * 2}


def test_each_group_comes_with_the_version_it_was_received_under() -> None:
    batch = leased_batch(POLLED, after=3)
    assert isinstance(batch, LeasedBatch)
    assert (batch.id, len(batch.groups)) == (4, 2)
    assert batch.received_under == [PolicyVersion(1, 7), None]
    nobody = {"registered": 1, "connected": 0}
    pending = leased_batch({"batch": None, "environments": nobody}, after=3)
    assert pending == EnvironmentCount(**nobody)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"received_under": None}, "use the same release of run-api and of the trainer"),
        ({"received_under": [None]}, "received_under has 1 entries for 2 groups; use the same"),
        ({"batch_id": 3}, "expected a batch after 3, got 3"),
        ({"batch": [GROUP, {}]}, "batch 4 is invalid: groups.1.tokens: Field required"),
    ],
)
def test_an_answer_that_breaks_the_contract_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ProtocolViolation, match=says):
        leased_batch(POLLED | changes, after=3)
