"""A scored group, field by field: what is taken, what is served again, what is refused."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.integration.run_api_calls import (
    group,
    next_batch,
    register,
    send,
    send_raw,
    start,
    status,
    submit,
)

ALL_KEYS = {
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages"),
    *("generation_params", "inference_logprobs", "overrides", "group_overrides", "images"),
    *("env_id", "distill_token_ids", "distill_logprobs"),
}
SAID = [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "hi"}]]
TEACHER = {
    "distill_token_ids": [[[], [7, 8], [90]], [[1], [2], [3, 4, 5]]],
    "distill_logprobs": [[[], [-0.1, -2.5], [0.0]], [[-1.0], [-2.0], [-0.5, -1.5, -3.0]]],
}


@pytest.fixture
def started(http: httpx.Client) -> httpx.Client:
    """One group fills a batch."""
    start(http, batch_size=2)
    return http


def served(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """What the trainer gets of a group."""
    answer = send_raw(http, body)
    assert (answer.status_code, answer.json()) == (200, {"status": "received"})
    (item,) = http.get("/batch").json()["batch"]
    assert set(item) == ALL_KEYS
    return dict(item)


def refusal(http: httpx.Client, body: Any) -> tuple[list[Any], str]:
    """Where and why it was refused."""
    answer = send_raw(http, body)
    assert answer.status_code == 422
    assert status(http)[1] == 0
    problem = answer.json()["detail"][0]
    return problem["loc"], problem["msg"]


def test_the_three_required_fields_are_enough_and_all_keys_are_served(
    started: httpx.Client,
) -> None:
    item = served(started, group(1))
    assert {name: value for name, value in item.items() if value is not None} == group(1)


@pytest.mark.parametrize("field", ["tokens", "masks", "scores"])
@pytest.mark.parametrize("how", ["missing", "null"])
def test_required_fields(started: httpx.Client, field: str, how: str) -> None:
    body = group(1) | {field: None}
    if how == "missing":
        del body[field]
    assert refusal(started, body)[0] == ["body", field]


@pytest.mark.parametrize(
    "optional",
    [
        {"advantages": [[0.5, 0.5, 0.5], [-0.5, -0.5, -0.5]]},
        {"advantages": [[0.5], []]},
        {"ref_logprobs": [[0.0, 0.0, -1.5], [0.0, 0.0, -2.5]]},
        {"ref_logprobs": [[-1.5], [-2.5]]},
        {"inference_logprobs": [[1.0, 1.0, -0.1], [1.0, 1.0, -1 / 3]]},
        {"messages": SAID},
        {"messages": [[], []]},
        {"messages": [[{"role": "tool", "content": [{"x": 1}], "reward": 0.5, "id": "7"}]] * 2},
        {"generation_params": {"temperature": 1.0, "stop": ["</s>"]}},
        {"overrides": [{}, {"set_advantage_to_zero": True}]},
        {"group_overrides": {"group_size": 2, "nested": {"policy_version": [[0, 1], [0, 2]]}}},
        {"images": ["aGk=", None]},
        {"images": "aGk="},
        {"images": {"a": [1, 2.5, None, True]}},
        {"images": 7},
        {"env_id": 7},
        TEACHER,
    ],
    ids=lambda optional: "+".join(optional),
)
def test_optional_fields_are_served_as_they_came(
    started: httpx.Client, optional: dict[str, Any]
) -> None:
    item = served(started, group(1, **optional))
    assert {name: item[name] for name in optional} == optional


@pytest.mark.parametrize("empty", [None, [], {}], ids=str)
@pytest.mark.parametrize(
    "field",
    [
        *("advantages", "ref_logprobs", "inference_logprobs", "messages", "overrides"),
        *("distill_token_ids", "distill_logprobs"),
    ],
)
def test_empty_optional_lists(started: httpx.Client, field: str, empty: Any) -> None:
    if empty == {}:
        assert refusal(started, group(1) | {field: empty})[0] == ["body", field]
    else:
        assert served(started, group(1) | {field: empty})[field] == empty


@pytest.mark.parametrize("field", ["generation_params", "group_overrides", "images"])
def test_empty_optional_objects(started: httpx.Client, field: str) -> None:
    assert served(started, group(1) | {field: {}})[field] == {}


def test_what_the_archived_environment_sends_without_results(started: httpx.Client) -> None:
    empty: dict[str, Any] = {
        **{name: [] for name in ("advantages", "ref_logprobs", "messages", "overrides", "images")},
        **dict.fromkeys(("distill_token_ids", "distill_logprobs", "generation_params", "env_id")),
        "group_overrides": {},
    }
    item = served(started, group(1, **empty))
    assert {name: item[name] for name in empty} == empty


def test_unknown_fields_are_dropped(started: httpx.Client) -> None:
    assert "surprise" not in served(started, group(1, surprise={"x": 1}))


def test_text_survives(started: httpx.Client) -> None:
    said = [[{"role": "user", "content": "naïve ☃ \u0000 \U0001f600"}]] * 2
    assert served(started, group(1, messages=said))["messages"] == said


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"tokens": [[1.0, "7", 90], [1, 7, 91]]}, "tokens", [[1, 7, 90], [1, 7, 91]]),
        ({"masks": [["-100", -100.0, 90], [-100, -100, 91]]}, "masks", group(1)["masks"]),
        ({"scores": ["1.5", 2]}, "scores", [1.5, 2.0]),
        ({"env_id": "3"}, "env_id", 3),
        ({"env_id": 3.0}, "env_id", 3),
    ],
)
def test_integral_floats_and_numeric_strings_are_coerced(
    started: httpx.Client, changes: dict[str, Any], field: str, value: Any
) -> None:
    assert served(started, group(1, **changes))[field] == value


@pytest.mark.parametrize(
    ("changes", "location"),
    [
        ({"tokens": [[1, 7, 1.5], [1, 7, 91]]}, ["tokens", 0, 2]),
        ({"tokens": [[1, 7, "x"], [1, 7, 91]]}, ["tokens", 0, 2]),
        ({"tokens": [[1, 7, -1], [1, 7, 91]]}, ["tokens", 0, 2]),
        ({"masks": [[-100, -100, 90.5], [-100, -100, 91]]}, ["masks", 0, 2]),
        ({"scores": ["high", 0.0]}, ["scores", 0]),
        ({"scores": [None, 0.0]}, ["scores", 0]),
        ({"env_id": 1.5}, ["env_id"]),
        ({"messages": [["hi"], ["hi"]]}, ["messages", 0, 0]),
        ({"messages": [[{"role": "user"}], SAID[1]]}, ["messages"]),
        ({"messages": [[{"content": "hi"}], SAID[1]]}, ["messages"]),
        ({"overrides": [1, 2]}, ["overrides", 0]),
        ({"group_overrides": []}, ["group_overrides"]),
        ({"generation_params": "hot"}, ["generation_params"]),
        ({"distill_token_ids": [[[1.5]], [[1]]]}, ["distill_token_ids", 0, 0, 0]),
    ],
)
def test_other_values_are_refused_by_field_and_index(
    started: httpx.Client, changes: dict[str, Any], location: list[Any]
) -> None:
    assert refusal(started, group(1, **changes))[0] == ["body", *location]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"masks": [[-100, 7, 90]]}, "masks: 1 entries for 2 sequences"),
        ({"masks": [[-100, 90], [-100, -100, 91]]}, "masks[0]: 2 values for 3 tokens"),
        ({"scores": [1.0]}, "scores: 1 entries for 2 sequences"),
        ({"inference_logprobs": [[1.0], [1.0]]}, "inference_logprobs[1]: 1 values for 3 tokens"),
        ({"advantages": [[1.0]]}, "advantages: 1 entries for 2 sequences"),
        ({"messages": SAID[:1]}, "messages: 1 entries for 2 sequences"),
        ({"overrides": [{}]}, "overrides: 1 entries for 2 sequences"),
        ({"tokens": [], "masks": [], "scores": []}, "at least one sequence"),
        ({"tokens": [[], [1]], "masks": [[], [1]]}, "tokens[0]: empty sequence"),
        (
            {"distill_token_ids": [[[7]], [[7]]], "distill_logprobs": [[[0.0]], [[0.0]]]},
            "distill_token_ids[0]: 1 values for 3 tokens",
        ),
        (
            TEACHER | {"distill_logprobs": [[[], [-0.1], [0.0]], [[-1.0], [-2.0], [-0.5] * 3]]},
            "distill_logprobs[0][1]: 1 values for 2 token ids",
        ),
        (TEACHER | {"distill_logprobs": []}, "distill_logprobs: absent"),
        (TEACHER | {"distill_token_ids": None}, "distill_token_ids: absent"),
    ],
)
def test_lengths_that_disagree_are_refused(
    started: httpx.Client, changes: dict[str, Any], says: str
) -> None:
    assert says in refusal(started, group(1, **changes))[1]


def test_a_list_is_queued_in_order(http: httpx.Client) -> None:
    start(http)
    answer = send_raw(http, [group(1), group(2)], "/scored_data_list")
    assert answer.json() == {"status": "received", "groups_processed": 2}
    assert next_batch(http) == [1, 2]


def test_an_empty_list_is_fine(http: httpx.Client) -> None:
    nothing = {"status": "received", "groups_processed": 0}
    assert send_raw(http, [], "/scored_data_list").json() == nothing
    start(http)
    assert send_raw(http, [], "/scored_data_list").json() == nothing
    assert status(http) == (0, 0)


def test_nothing_of_a_list_is_queued_where_one_item_is_invalid(http: httpx.Client) -> None:
    start(http)
    answer = send_raw(http, [group(1), group(2, scores=[0.0])], "/scored_data_list")
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["body", 1]
    assert status(http) == (0, 0)


def test_latest_example_is_the_last_queued_group_whole(http: httpx.Client) -> None:
    start(http)
    send(http, 1, messages=SAID)
    latest = http.get("/latest_example").json()
    assert set(latest) == ALL_KEYS
    assert (latest["tokens"], latest["messages"]) == (group(1)["tokens"], SAID)
    submit(http, 2)
    assert next_batch(http) == [1, 2]
    assert http.get("/latest_example").json()["tokens"] == group(2)["tokens"]


def test_latest_example_outlives_its_batch_and_a_trainer(http: httpx.Client) -> None:
    start(http)
    submit(http, 1, 2)
    assert next_batch(http) == [1, 2]
    assert next_batch(http) is None
    register(http)
    assert http.get("/latest_example").json()["tokens"][0][0] == 2
    submit(http, 3)
    assert http.get("/latest_example").json()["tokens"][0][0] == 3
