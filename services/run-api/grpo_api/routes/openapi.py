"""What FastAPI cannot see of the routes for its OpenAPI document: refusals, and bodies that the
handlers read themselves."""

from __future__ import annotations

import sys
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import FloatSchema, IntSchema, ModelSchema

from grpo_core.wire.run_api import EnvironmentId, EnvironmentRegistration, Registration
from grpo_core.wire.scored_group import ScoredGroup

Json = dict[str, Any]

OPENAPI_PATH = "/openapi.json"
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/health"})
"""Answered without a token, because probes do not send one."""
DESCRIPTION = (
    "Queues scored groups from environments and hands out batches to the trainer. "
    'Clients may also send a number as text, for example "2" instead of 2.'
)

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

_WHEN = {
    400: "Content-Encoding names gzip, but the body is not valid gzip",
    401: "The access token is missing or wrong",
    403: "The request comes from a web page of another site",
    404: "No batch or environment has the given id",
    408: "The body did not arrive within the deadline; the connection is closed",
    409: "The request conflicts with the state of the run",
    413: "The body is too large",
    422: "The body or a parameter is invalid, or the group fits no batch",
    503: "Redis is unreachable, the queue is full, or run-api is stopping. Repeat the request",
}
_HEADERS: dict[int, Json] = {
    401: {"WWW-Authenticate": {"required": True, "schema": {"const": "Bearer"}}},
    503: {
        "Retry-After": {
            "description": "seconds to wait",
            "required": True,
            "schema": {"type": "integer", "minimum": 1},
        }
    },
}


class Problem(BaseModel, extra="forbid"):
    """One problem of a request. `loc` begins with body, query, path or header."""

    loc: list[str | int]
    msg: str
    type: str


class RefusedRequest(BaseModel, extra="forbid"):
    """The answer to a rejected request, which changed nothing."""

    detail: str | list[Problem]


class ServedGroup(ScoredGroup, extra="forbid", json_schema_serialization_defaults_required=True):
    """The newest group. A field of the group is null if the environment did not send the field."""


def refusals(*statuses: int) -> dict[int | str, Json]:
    """The `responses` entry of a route: its error statuses."""
    return {
        status: {
            "model": RefusedRequest,
            "description": _WHEN[status],
            "headers": _HEADERS.get(status, {}),
        }
        for status in statuses
    }


def json_body(model: type[BaseModel], *, many: bool = False) -> Json:
    """The `openapi_extra` entry of a route that reads its body itself."""
    one = {"$ref": _COMPONENTS + model.__name__}
    schema = {"type": "array", "items": one} if many else one
    return {
        "requestBody": {
            "required": True,
            "description": "gzip-encoded if Content-Encoding is gzip",
            "content": {"application/json": {"schema": schema}},
        },
    }


def linked(operation: str, **parameters: str) -> Json:
    """A `links` entry of an answer: which of its values the next call needs."""
    return {"operationId": operation, "parameters": parameters}


def describe(app: FastAPI, token_needed: bool) -> None:
    """Add the bodies, and the token if there is one, to the document of `app`."""
    build = app.openapi

    def document() -> Json:
        document = build()
        document["components"]["schemas"] |= {
            model.__name__: body_schema(model) for model in _BODIES
        }
        if token_needed:
            scheme = {"type": "http", "scheme": "bearer"}
            document["components"]["securitySchemes"] = {_SECURITY: scheme}
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    operation["security"] = [] if path in OPEN_PATHS else [{_SECURITY: []}]
        return document

    # FastAPI documents this assignment as the way to change the document
    app.openapi = document  # type: ignore[method-assign]


def body_schema(model: type[BaseModel]) -> Json:
    """The schema of a body, with the checks of its validators, except those that no schema can
    express, such as equal lengths."""
    schema = model.model_json_schema(schema_generator=LaxJsonSchema)
    if model is ScoredGroup:
        properties = schema["properties"]
        for name in ("tokens", "masks", "scores"):
            properties[name]["minItems"] = 1
        properties["tokens"]["items"]["minItems"] = 1
        (conversations, _null) = properties["messages"]["anyOf"]
        conversations["items"]["items"]["required"] = ["role", "content"]
    return schema


class LaxJsonSchema(GenerateJsonSchema):
    """Declares that numbers may be sent as plain text or booleans.

    The server also accepts spaces around the text, a plus sign, and underscores between digits.
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
        """Declare that unknown fields are accepted, and dropped."""
        return {**super().model_schema(schema), "additionalProperties": True}


def _also(number: JsonSchemaValue, text: str, least: float | None) -> JsonSchemaValue:
    # False counts as 0, which is below a positive minimum.
    truth: dict[str, Any] = {"const": True} if least is not None and least > 0 else {}
    return {
        "anyOf": [number, {"type": "string", "pattern": text}, {"type": "boolean", **truth}],
        "description": "a number, or its text; true counts as 1, false as 0",
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
