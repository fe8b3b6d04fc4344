"""The schema of a body says yes where pydantic does, and no where it does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, ValidationError

from grpo_api.openapi import body_schema
from grpo_core.wire import EnvironmentId, EnvironmentRegistration, Registration, ScoredGroup

REGISTRATION = {
    **dict.fromkeys(("wandb_group", "wandb_project", "checkpoint_dir"), "x"),
    **dict.fromkeys(("batch_size", "max_token_len", "save_checkpoint_interval"), 4),
    **dict.fromkeys(("starting_step", "num_steps"), 0),
}
ENVIRONMENT = {"max_token_length": 9, "desired_name": "x", "weight": 1.0, "group_size": 4}
GROUP = {"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [0.5]}

SPELLINGS = [
    *("null", "true", "false", "0", "1", "-0", "-1", "-2", "-100", "-101", "2.0", "2e2", "0.5"),
    *(
        "65536",
        "65537",
        "2147483647",
        "2147483648",
        "1e9",
        "1000000001",
        "1e308",
        "1e400",
        "-1e400",
    ),
    *('""', '"0"', '"1"', '"-1"', '"-100"', '"0.5"', '"2.5"', '"x"', '"nan"', '"inf"', '"1e5x"'),
    *('"\u0661"', '"0x1"', '"-"', '"1,5"', "[]", "[1]", "[[1]]", "{}", '{"a": 1}'),
]
BEYOND_SCHEMAS = {
    ("images", "1e400"): "numbers are finite at any depth",
    ("images", "-1e400"): "numbers are finite at any depth",
    ("tokens", "[[1]]"): "lengths agree",
    ("masks", "[[1]]"): "lengths agree",
}
"""Declared, and refused by what a schema cannot say."""


def accepts(model: type[BaseModel], text: str) -> bool:
    try:
        model.model_validate_json(text)
    except ValidationError:
        return False
    return True


def spelled(body: dict[str, Any], path: list[str | int], literal: str) -> str:
    """The body with one value replaced by what may be no JSON that Python could write."""
    copy: Any = json.loads(json.dumps(body))
    holder = copy
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = "<here>"
    return json.dumps(copy).replace('"<here>"', literal)


PLACES: list[tuple[type[BaseModel], dict[str, Any], list[str | int]]] = [
    *((Registration, REGISTRATION, [name]) for name in REGISTRATION),
    *((EnvironmentRegistration, ENVIRONMENT, [name]) for name in ENVIRONMENT),
    (EnvironmentRegistration, ENVIRONMENT, ["min_batch_allocation"]),
    (EnvironmentId, {"env_id": 1}, ["env_id"]),
    *((ScoredGroup, GROUP, [name]) for name in ("tokens", "masks", "scores", "env_id", "images")),
    *((ScoredGroup, GROUP, [name]) for name in ("generation_params", "group_overrides")),
    (ScoredGroup, GROUP, ["tokens", 0, 0]),
    (ScoredGroup, GROUP, ["masks", 0, 0]),
    (ScoredGroup, GROUP, ["scores", 0]),
]


@pytest.mark.parametrize(
    ("model", "body", "path"),
    PLACES,
    ids=[f"{model.__name__} {path}" for model, _, path in PLACES],
)
@pytest.mark.parametrize("literal", SPELLINGS)
def test_schema_and_record_agree(
    model: type[BaseModel], body: dict[str, Any], path: list[str | int], literal: str
) -> None:
    text = spelled(body, path, literal)
    declared = Draft202012Validator(body_schema(model)).is_valid(json.loads(text))
    if (path[-1], literal) in BEYOND_SCHEMAS:
        assert declared
        assert not accepts(model, text)
    else:
        assert declared == accepts(model, text)


@pytest.mark.parametrize("literal", ['" 7"', '"+7"', '"7.0"', '"1_0"', '"007"'])
def test_unusual_spellings_are_accepted_beyond_what_is_declared(literal: str) -> None:
    text = spelled(ENVIRONMENT, ["group_size"], literal)
    assert accepts(EnvironmentRegistration, text)
    assert not Draft202012Validator(body_schema(EnvironmentRegistration)).is_valid(json.loads(text))
