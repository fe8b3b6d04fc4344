"""The schema of a body accepts exactly the values that pydantic accepts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel, ValidationError

from grpo_api.routes.openapi import body_schema
from grpo_core.wire.run_api import EnvironmentId, EnvironmentRegistration, Registration
from grpo_core.wire.scored_group import ScoredGroup
from tests.integration.run_api_calls import ENVIRONMENT, REGISTRATION, group

BODIES: dict[type[BaseModel], dict[str, Any]] = {
    Registration: REGISTRATION,
    EnvironmentRegistration: ENVIRONMENT,
    EnvironmentId: {"env_id": 1},
    ScoredGroup: group(1, size=1, env_id=None, images=None, generation_params=None),
}
SCHEMAS = {model: Draft202012Validator(body_schema(model)) for model in BODIES}
Path = list[str | int]
PLACES: list[tuple[type[BaseModel], Path]] = [
    *((Registration, [name]) for name in ("wandb_group", "batch_size", "max_token_len")),
    (Registration, ["starting_step"]),
    *((EnvironmentRegistration, [name]) for name in ("group_size", "weight")),
    (EnvironmentRegistration, ["min_batch_allocation"]),
    (EnvironmentId, ["env_id"]),
    *((ScoredGroup, [name]) for name in ("tokens", "scores", "env_id", "images")),
    (ScoredGroup, ["generation_params"]),
    *((ScoredGroup, path) for path in (["tokens", 0, 0], ["masks", 0, 0], ["scores", 0])),
]
"""One example of a place for each type of field."""
BOUNDS = (-101, -100, -2, -1, 0, 1, 2**16, 2**31, 10**9)
VALUES = st.one_of(
    st.sampled_from(["null", "true", "2.0", "2e2", "0.5", "[]", "[1]", "{}"]),
    st.builds(lambda bound, off: str(bound + off), st.sampled_from(BOUNDS), st.integers(-1, 1)),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
)
ANY_TEXT = st.text("0123456789.-+eE_x \u0661", max_size=12)


def accepts(model: type[BaseModel], text: str) -> bool:
    try:
        model.model_validate_json(text)
    except ValidationError:
        return False
    return True


def spelled(model: type[BaseModel], path: Path, literal: str) -> str:
    """The model's body with one value replaced, perhaps by text that is not valid JSON."""
    body: Any = json.loads(json.dumps(BODIES[model]))
    holder = body
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = "<here>"
    return json.dumps(body).replace('"<here>"', literal)


def verdicts(model: type[BaseModel], path: Path, literal: str) -> tuple[bool, bool]:
    """Whether the schema accepts the body, and whether the record does."""
    text = spelled(model, path, literal)
    return SCHEMAS[model].is_valid(json.loads(text)), accepts(model, text)


@pytest.mark.parametrize(
    ("model", "path"), PLACES, ids=[f"{model.__name__}{path}" for model, path in PLACES]
)
@given(value=VALUES, text=ANY_TEXT)
def test_the_schema_and_the_record_agree(
    model: type[BaseModel], path: Path, value: str, text: str
) -> None:
    declared, accepted = verdicts(model, path, value)
    assert declared == accepted
    # the record also accepts some unusual spellings of numbers, but never less than the schema
    declared, accepted = verdicts(model, path, json.dumps(text))
    assert accepted or not declared
