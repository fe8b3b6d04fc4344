"""This API as OpenAPI 3.1: what routes declare of themselves, and the document made of it.

All of it is done once, when the document is asked for first: requests pay nothing."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import FloatSchema, IntSchema, ModelSchema

from grpo_core.wire.run_api import EnvironmentId, EnvironmentRegistration, Registration
from grpo_core.wire.scored_group import ScoredGroup

Json = dict[str, Any]

OPENAPI_PATH = "/openapi.json"
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/health"})
"""Answered without the token: probes have none."""

_COMPONENTS = "#/components/schemas/"
_BODIES: tuple[type[BaseModel], ...] = (
    Registration,
    EnvironmentRegistration,
    EnvironmentId,
    ScoredGroup,
)
_MOST_DIGITS = 9
_FRACTION = r"(\.[0-9]{1,17})?"
_SECURITY = "token"
_FASTAPI_ERRORS = ("HTTPValidationError", "ValidationError")

_WHEN = {
    400: "The body says that it is gzip and is not",
    401: "No token, or another one",
    403: "A web page of another site asked",
    404: "No such batch or environment",
    408: "The body did not arrive in full in time; the connection is closed",
    409: "It conflicts with the state of the run",
    413: "The body is too large",
    422: "It breaks the record, or can never be served",
    503: "Not now: Redis is away, the queue or memory is full, or the server stops. Send it again",
}
_RETRY_AFTER = {
    "Retry-After": {
        "description": "seconds to wait",
        "required": True,
        "schema": {"type": "integer", "minimum": 1},
    }
}
_REQUEST_ID = {
    "description": "the caller's where it is 1 to 128 visible ASCII characters, else a new one",
    "required": True,
    "schema": {"type": "string", "pattern": "^[!-~]{1,128}$"},
}
_STAMPED = {"X-Request-Id": {"$ref": "#/components/headers/X-Request-Id"}}


class Problem(BaseModel):
    """What is wrong, and where: `loc` begins with body, query, path or header."""

    model_config = ConfigDict(extra="forbid")

    loc: list[str | int]
    msg: str
    type: str


class Refusal(BaseModel):
    """Nothing was changed."""

    model_config = ConfigDict(extra="forbid")

    detail: str | list[Problem]


def refusals(*statuses: int) -> dict[int | str, Json]:
    """For `responses` of a route: the errors that it answers."""
    return {status: _refusal(status) for status in statuses}


def json_body(model: type[BaseModel], *, many: bool = False) -> Json:
    """For `openapi_extra` of a route whose body is read by a dependency of our own."""
    one = {"$ref": _COMPONENTS + model.__name__}
    schema = {"type": "array", "items": one} if many else one
    return {
        "requestBody": {
            "required": True,
            "description": "gzip where Content-Encoding says so",
            "content": {"application/json": {"schema": schema}},
        },
        "responses": {"408": _refusal_of_any_body(408)},
    }


def linked(operation: str, **parameters: str) -> Json:
    """For `links` of an answer: which of its values the next call takes."""
    return {"operationId": operation, "parameters": parameters}


def describe(app: FastAPI, token_needed: bool) -> None:
    """Let `app` answer with its document, which is made for the first who asks."""

    def document() -> Json:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, token_needed)
        return app.openapi_schema

    # FastAPI's way to replace the document
    app.openapi = document  # type: ignore[method-assign]


def _refusal(status: int) -> Json:
    answer: Json = {"model": Refusal, "description": _WHEN[status]}
    return answer | {"headers": _RETRY_AFTER} if status == 503 else answer


def _refusal_of_any_body(status: int) -> Json:
    return {
        "description": _WHEN[status],
        "content": {"application/json": {"schema": {"$ref": _COMPONENTS + Refusal.__name__}}},
    }


def _document(app: FastAPI, token_needed: bool) -> Json:
    document = get_openapi(
        title="run-api",
        version=version("grpo-run-api"),
        description="Scored groups in, training batches out. A number may also be sent as text.",
        routes=app.routes,
    )
    schemas = document["components"]["schemas"]
    for name in _FASTAPI_ERRORS:
        schemas.pop(name, None)
    document["components"]["headers"] = {"X-Request-Id": _REQUEST_ID}
    schemas |= {model.__name__: body_schema(model) for model in _BODIES}
    if token_needed:
        document["components"]["securitySchemes"] = {
            _SECURITY: {"type": "http", "scheme": "bearer"}
        }
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _answer_as_we_do(operation)
            if token_needed and path not in OPEN_PATHS:
                _ask_for_the_token(operation)
    return document


def body_schema(model: type[BaseModel]) -> Json:
    schema = model.model_json_schema(schema_generator=LaxJsonSchema)
    if model is ScoredGroup:
        _add_what_validators_check(schema["properties"])
    return schema


def _add_what_validators_check(properties: Json) -> None:
    """As far as a schema can say it: not that lengths agree, nor that nested numbers are finite."""
    properties["tokens"]["minItems"] = 1
    properties["tokens"]["items"]["minItems"] = 1
    for name in ("masks", "scores"):
        properties[name]["minItems"] = 1
    (conversations, _null) = properties["messages"]["anyOf"]
    conversations["items"]["items"]["required"] = ["role", "content"]


def _answer_as_we_do(operation: Json) -> None:
    """FastAPI declares a 422 of its own for every parameter, also for those that take anything."""
    answers = operation["responses"]
    if any(name in str(answers.get("422")) for name in _FASTAPI_ERRORS):
        del answers["422"]
    answers["403"] = _refusal_of_any_body(403)
    for answer in answers.values():
        answer["headers"] = answer.get("headers", {}) | _STAMPED


def _ask_for_the_token(operation: Json) -> None:
    operation["security"] = [{_SECURITY: []}]
    operation["responses"]["401"] = _refusal_of_any_body(401) | {
        "headers": _STAMPED
        | {"WWW-Authenticate": {"required": True, "schema": {"const": "Bearer"}}},
    }


class LaxJsonSchema(GenerateJsonSchema):
    """The plain spellings of numbers as text are declared. Some others are accepted as well: with
    spaces around them, a plus sign, or underscores between digits.
    """

    def int_schema(self, schema: IntSchema) -> JsonSchemaValue:
        least, most = schema.get("ge"), schema.get("le")
        return _also(super().int_schema(schema), _integer_text(least, most), least)

    def float_schema(self, schema: FloatSchema) -> JsonSchemaValue:
        number = super().float_schema(schema)
        number.setdefault("minimum", -sys.float_info.max)
        number.setdefault("maximum", sys.float_info.max)
        return _also(number, _float_text(schema.get("ge"), schema.get("le")), schema.get("ge"))

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        """Says aloud that unknown fields are taken, and dropped."""
        return {**super().model_schema(schema), "additionalProperties": True}


def _also(number: JsonSchemaValue, text: str, least: float | None) -> JsonSchemaValue:
    # false is 0
    truth: dict[str, Any] = {"const": True} if least is not None and least > 0 else {}
    return {
        "anyOf": [number, {"type": "string", "pattern": text}, {"type": "boolean", **truth}],
        "description": "a number, or the same as text; true is 1, false is 0",
    }


def _integer_text(least: int | None, most: int | None) -> str:
    digits = _MOST_DIGITS if most is None else len(str(most)) - 1
    if least is not None and least > 0:
        return f"^[1-9][0-9]{{0,{digits - 1}}}$"
    if least is not None and least < 0:
        below = len(str(-least)) - 1
        return f"^({least}{f'|-[0-9]{{1,{below}}}' if below else ''}|[0-9]{{1,{digits}}})$"
    return f"^[0-9]{{1,{digits}}}$"


def _float_text(least: float | None, most: float | None) -> str:
    sign = "-?" if least is None or least < 0 else ""
    if most is not None and most < 10:
        return f"^(0{_FRACTION}|{most:.0f})$"
    return f"^{sign}[0-9]{{1,{_MOST_DIGITS}}}{_FRACTION}$"
