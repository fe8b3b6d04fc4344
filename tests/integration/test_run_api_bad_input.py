"""Nothing a client sends gives a 5xx or leaves a trace."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.fixtures.run_api import MAX_BODY_BYTES
from tests.integration.run_api_calls import (
    ENVIRONMENT,
    REGISTRATION,
    group,
    next_batch,
    register_environment,
    start,
    status,
    submit,
)
from tests.integration.stored_keys import stored_keys

GZIP = {"Content-Encoding": "gzip"}


@pytest.fixture
def started(http: httpx.Client) -> httpx.Client:
    """One group of two sequences is queued; a batch holds four."""
    start(http)
    register_environment(http)
    submit(http, 1)
    return http


@pytest.fixture
def untouched(started: httpx.Client, redis_url: str) -> Iterator[httpx.Client]:
    """The same, of which nothing may change."""
    before = stored_keys(redis_url, "tests", without=("receipt:",))
    assert len(before) > 10
    yield started
    assert stored_keys(redis_url, "tests", without=("receipt:",)) == before


def refused(answer: httpx.Response, status: int = 422) -> list[Any]:
    """Where it says that the trouble is."""
    assert answer.status_code == status, answer.text
    problem = answer.json()["detail"][0]
    assert problem.keys() == {"loc", "msg", "type"}
    location: list[Any] = problem["loc"]
    return location


def assert_unchanged(http: httpx.Client) -> None:
    assert status(http) == (0, 1)
    submit(http, 2)
    assert next_batch(http) == [1, 2]


@pytest.mark.parametrize(
    ("bad", "location"),
    [
        (group(9, scores=[0.0, float("nan")]), ["scores", 1]),
        (group(9, scores=[float("inf"), 0.0]), ["scores", 0]),
        (group(9, group_overrides={"x": float("nan")}), ["group_overrides"]),
        (group(9, tokens=[[9, 7, 1.5], [9, 7, 91]]), ["tokens", 0, 2]),
        (group(9, tokens=[[9, 7], [9, 7, 91]]), []),
        (group(9, tokens=[], masks=[], scores=[]), []),
        (group(9, env_id=-1), ["env_id"]),
        (group(9, env_id=10**40), ["env_id"]),
        (group(9, size=3), ["tokens"]),
        (group(9, size=8), ["tokens"]),
        (group(9, size=4, env_id=0), ["tokens"]),
        ({}, ["tokens"]),
        ([], []),
        (None, []),
    ],
)
def test_bad_group_is_refused_by_name(
    started: httpx.Client, bad: Any, location: list[str | int]
) -> None:
    answer = started.post("/scored_data", content=json.dumps(bad))
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["body", *location]

    # nothing of a list is queued where one item is bad
    answer = started.post("/scored_data_list", content=json.dumps([group(8), bad]))
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["body", 1, *location]
    assert_unchanged(started)


@pytest.mark.parametrize(
    "path", ["/scored_data", "/scored_data_list", "/register", "/register-env"]
)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"images":' + b"[" * 100_000,
        b'{"tokens": ' + b"9" * 10_000 + b"}",
        b'{"desired_name": "\\ud800", "wandb_group": "\\ud800"}',
        b"NaN",
        b'{"weight": NaN, "scores": [NaN]}',
        b"[" + b"NaN," * 50_000 + b"NaN]",
        b'{"' + b"k" * 100_000 + b'": 1}',
    ],
    ids=lambda body: body[:12].decode("latin1"),
)
def test_garbage_is_a_client_error(started: httpx.Client, path: str, body: bytes) -> None:
    answer = started.post(path, content=body)
    assert answer.status_code == 422
    assert answer.json()["detail"][0].keys() == {"loc", "msg", "type"}
    assert len(answer.content) < 100_000
    assert_unchanged(started)


NUMBER = "<number>"
ROWS = [[NUMBER, 0.5, 0.5], [0.5] * 3]
NUMBERS: list[tuple[str, str, dict[str, Any]]] = [
    *(("/register", name, REGISTRATION | {name: NUMBER}) for name in REGISTRATION if "_" in name),
    *(("/register-env", name, ENVIRONMENT | {name: NUMBER}) for name in ENVIRONMENT),
    ("/disconnect-env", "env_id", {"env_id": NUMBER}),
    ("/status-env", "env_id", {"env_id": NUMBER}),
    *(
        ("/scored_data", name, group(9, **{name: value}))
        for name, value in {
            "tokens": [[NUMBER, 7, 90], [9, 7, 91]],
            "masks": [[NUMBER, 7, 90], [9, 7, 91]],
            "scores": [NUMBER, 1.5],
            "env_id": NUMBER,
            **dict.fromkeys(("advantages", "ref_logprobs", "inference_logprobs"), ROWS),
            "distill_token_ids": [[[NUMBER], [], []], [[], [], []]],
            "distill_logprobs": [[[NUMBER], [], []], [[], [], []]],
            "messages": [[{"role": "user", "content": "", "x": [NUMBER]}], []],
            "overrides": [{"x": {"y": NUMBER}}, {}],
            "group_overrides": {"x": NUMBER},
            "generation_params": {"x": [[NUMBER]]},
            "images": NUMBER,
        }.items()
    ),
]
NO_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e400", "-1E400"]
BEYOND = "9" * 5000


@pytest.mark.parametrize(
    ("path", "field", "body"), NUMBERS, ids=[f"{path} {field}" for path, field, _ in NUMBERS]
)
def test_what_is_no_finite_number_is_refused_in_every_field(
    untouched: httpx.Client, path: str, field: str, body: dict[str, Any]
) -> None:
    method = "GET" if path == "/status-env" else "POST"

    def send(literal: str, text: str = json.dumps(body)) -> httpx.Response:
        content = text.replace(f'"{NUMBER}"', literal)
        assert content != text
        return untouched.request(method, path, content=content)

    for literal in NO_NUMBERS:
        assert refused(send(literal))[:2] == ["body", field]
    # more digits than are read at all: no field is known yet, the message gives line and column
    answer = send(BEYOND)
    assert refused(answer) == ["body"]
    assert "number out of range at line 1 column" in answer.json()["detail"][0]["msg"]


FREE_FORM = {
    "messages": '[[{"role": "user", "content": "", "x": %s}], []]',
    "overrides": "[%s, {}]",
    "group_overrides": "%s",
    "generation_params": "%s",
    "images": "[%s]",
    "something": "%s",
}


@pytest.mark.parametrize("field", FREE_FORM)
def test_json_without_end_is_refused_in_every_free_form_field(
    untouched: httpx.Client, field: str
) -> None:
    for opening, closing in (('{"a":', "}"), ('{"a":[', "]}")):
        deep = FREE_FORM[field] % (opening * 10_000 + "1" + closing * 10_000)
        content = json.dumps(group(9))[:-1] + f', "{field}": {deep}}}'
        for path, body in (("/scored_data", content), ("/scored_data_list", f"[{content}]")):
            answer = untouched.post(path, content=body)
            assert refused(answer) == ["body"]
            assert "recursion limit exceeded" in answer.text


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: b"\xef\xbb\xbf" + text,
        lambda text: text.decode().encode("utf-16"),
        lambda text: text + b"\0",
        lambda text: text + b"{}",
        lambda text: text[:-1] + b', "x": "\xff"}',
        lambda text: text[:-1] + b', "x": "\\ud800"}',
        lambda text: text[:-1] + b', "x": "\n"}',
        lambda text: text[:-1] + b', "x": 01}',
        lambda text: text[:-1] + b",}",
    ],
    ids=["BOM", "UTF-16", "NUL", "two", "UTF-8", "surrogate", "control", "octal", "comma"],
)
@pytest.mark.parametrize(
    ("path", "body"),
    [("/register", REGISTRATION), ("/register-env", ENVIRONMENT), ("/scored_data", group(9))],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_json_is_refused(
    untouched: httpx.Client, path: str, body: dict[str, Any], spoil: Any
) -> None:
    answer = untouched.post(path, content=spoil(json.dumps(body).encode()))
    assert refused(answer) == ["body"]
    assert "Invalid JSON" in answer.text


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/register", REGISTRATION, "wandb_group"),
        ("/register", REGISTRATION, "wandb_project"),
        ("/register", REGISTRATION, "checkpoint_dir"),
        ("/register-env", ENVIRONMENT, "desired_name"),
    ],
)
@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, 7, None], ids=repr)
def test_names_are_of_bounded_length_and_without_nul(
    untouched: httpx.Client, path: str, body: dict[str, Any], field: str, name: Any
) -> None:
    assert refused(untouched.post(path, json=body | {field: name})) == ["body", field]


@pytest.mark.parametrize("path", ["/register", "/register-env", "/scored_data"])
def test_gzip_that_is_cut_or_damaged_anywhere_is_400(untouched: httpx.Client, path: str) -> None:
    bodies = {"/register": REGISTRATION, "/register-env": ENVIRONMENT, "/scored_data": group(9)}
    member = gzip.compress(json.dumps(bodies[path]).encode())
    header, trailer = 10, 8
    damaged = [member[:end] for end in range(1, len(member))]
    for at in (0, 1, 2, *range(header, len(member))):
        damaged.append(member[:at] + bytes([member[at] ^ 0x55]) + member[at + 1 :])
    assert len(damaged) > 2 * (len(member) - header - trailer)
    for body in damaged:
        answer = untouched.post(path, content=body, headers=GZIP)
        assert answer.status_code == 400, body
        assert "gzip" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/scored_data", b'{"images":"%s"}'),
        ("/scored_data_list", b'[{"images":"%s"}]'),
        ("/scored_data_list", b"[%s]"),
        ("/register", b'{"wandb_group":"%s"}'),
        ("/register-env", b'{"desired_name":"%s"}'),
        ("/disconnect-env", b'{"env_id":"%s"}'),
    ],
)
def test_gzip_bombs_are_413_wherever_they_are(
    untouched: httpx.Client, path: str, text: bytes
) -> None:
    bomb = gzip.compress(text % (b" " * (5 * MAX_BODY_BYTES)))
    assert untouched.post(path, content=bomb, headers=GZIP).status_code == 413
    # what is within the limit stays packed: gzip inside of gzip is no JSON
    nested = gzip.compress(gzip.compress(bomb))
    assert untouched.post(path, content=nested, headers=GZIP).status_code == 422
