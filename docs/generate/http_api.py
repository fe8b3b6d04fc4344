"""run-api's routes and records, from its OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from docs.generate.markdown import table
from docs.generate.source import NoDocstring

Json = dict[str, Any]

_PAGES = {"ScoredGroup": "wire-format.md#fields"}
"""Records that have a place of their own; the others stand below the routes."""
_PARAGRAPH = "\n\n"
_INT32 = 2**31 - 1


def routes() -> str:
    """One section per route: what it is for, its parameters, body, answers and refusals."""
    sections = [
        _route(method, path, operation)
        for path, operations in _document()["paths"].items()
        for method, operation in operations.items()
    ]
    return _PARAGRAPH.join(sections)


def fields(record: str) -> str:
    """The fields of a record that a request carries."""
    schema = _schemas()[record]
    required = schema.get("required", [])
    return table(
        ["Field", "Type", "Required"],
        [
            [f"`{name}`", _type(one), "yes" if name in required else "no"]
            for name, one in schema["properties"].items()
        ],
    )


@cache
def _document() -> Json:
    from fastapi import FastAPI

    from grpo_api.routes import admin, environments, scored_data, trainer
    from grpo_api.routes.openapi import describe, refusals

    app = FastAPI(generate_unique_id_function=lambda route: route.name, responses=refusals(403))
    for nouns in (environments, scored_data, trainer, admin):
        app.include_router(nouns.router)
    describe(app, token_needed=False)
    return app.openapi()


def _schemas() -> Json:
    schemas: Json = _document()["components"]["schemas"]
    return schemas


def _route(method: str, path: str, operation: Json) -> str:
    if "description" not in operation:
        raise NoDocstring(
            f"{operation['operationId']}: write a docstring; the documentation shows it"
        )
    parts = [f"### `{method.upper()} {path}`", operation["description"]]
    if parameters := operation.get("parameters"):
        rows = [[f"`{one['name']}`", one["in"], *_parameter(one)] for one in parameters]
        parts.append(table(["Parameter", "In", "Type", "Meaning"], rows))
    if "requestBody" in operation:
        parts.append(f"Body: {_linked(_json(operation['requestBody']))}")
    parts.append(_answers(operation["responses"]["200"]))
    *others, last = sorted(status for status in operation["responses"] if status != "200")
    statuses = f"{', '.join(others)} or {last}" if others else last
    parts.append(f"A [refused request](#refusals) is answered with status {statuses}.")
    return _PARAGRAPH.join(parts)


def _parameter(parameter: Json) -> tuple[str, str]:
    schema = parameter["schema"]
    inner = [one for one in schema.get("anyOf", []) if "description" in one]
    says = parameter.get("description") or (inner[0]["description"] if inner else "")
    return _type(schema).removesuffix(" or null"), says


def _json(message: Json) -> Json:
    schema: Json = message["content"].get("application/json", {}).get("schema", {})
    return schema


def _answers(response: Json) -> str:
    schema = _json(response)
    if not schema:
        return f"Response: {' or '.join(f'`{kind}`' for kind in response['content'])}"
    alternatives = schema.get("anyOf", [schema])
    if len(alternatives) == 1:
        return f"Response: `{_shape(schema)}`"
    lines = [f"- `{_shape(one)}`{_said_of(one)}" for one in alternatives]
    return "\n".join(["One of these responses:", "", *lines])


def _said_of(schema: Json) -> str:
    says = _resolved(schema).get("description", "")
    return f": {' '.join(says.split())}" if says else ""


def _linked(schema: Json) -> str:
    if schema.get("type") == "array":
        return f"a list of {_linked(schema['items'])}"
    name = schema["$ref"].rsplit("/", 1)[1]
    return f"[{name}]({_PAGES.get(name, f'#{name.lower()}')})"


def _resolved(schema: Json) -> Json:
    if "$ref" not in schema:
        return schema
    resolved: Json = _schemas()[schema["$ref"].rsplit("/", 1)[1]]
    return resolved


def _shape(schema: Json) -> str:
    """An answer as JSON with types in place of values."""
    if schema.get("$ref", "").endswith("/ServedGroup"):
        return "group"
    schema = _resolved(schema)
    if "properties" in schema:
        required = schema.get("required", [])
        fields = (
            f'"{name}"{"" if name in required else "?"}: {_shape(one)}'
            for name, one in schema["properties"].items()
        )
        return "{" + ", ".join(fields) + "}"
    if schema.get("type") == "array":
        if "prefixItems" in schema:
            return f"[{', '.join(_shape(one) for one in schema['prefixItems'])}]"
        return "[]" if schema.get("maxItems") == 0 else f"[{_items(schema)}, …]"
    return _type(schema)


def _items(schema: Json) -> str:
    if "anyOf" in schema.get("items", {}):
        return " or ".join(_shape(one) for one in schema["items"]["anyOf"])
    return _shape(schema["items"])


def _type(schema: Json) -> str:
    """Numbers may also be sent as text: only the number is named."""
    schema = _resolved(schema)
    if "const" in schema:
        return f'"{schema["const"]}"'
    if "enum" in schema:
        return str(schema["enum"][0])
    if "anyOf" in schema:
        kinds = list(schema["anyOf"])
        if any(one.get("type") in ("integer", "number") for one in kinds):
            kinds = [one for one in kinds if one.get("type") not in ("string", "boolean")]
        names = list(dict.fromkeys(_type(one) for one in kinds))
        if len(names) == 2 and names[0].startswith("list ") and names[1] == "null":
            return f"{names[0]}, or null"
        return " or ".join(names)
    if schema.get("type") == "array":
        return f"list of {_plural(schema.get('items', {}))}"
    return " ".join([_NAMES.get(schema.get("type", ""), "anything"), *_bounds(schema)])


def _plural(schema: Json) -> str:
    """The name of a list's items: `lists of numbers`."""
    name = _type(schema)
    if name == "anything":
        return name
    noun, separator, rest = name.partition(" ")
    return f"{noun}s{separator}{rest}"


_NAMES = {
    "integer": "integer",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "object": "object",
    "null": "null",
}


def _bounds(schema: Json) -> Iterator[str]:
    least, most = schema.get("minimum"), schema.get("maximum")
    least = None if least is None or abs(least) >= _INT32 else least
    most = None if most is None or most >= _INT32 else most
    if least is not None and most is not None:
        yield f"from {least:g} to {most:g}"
    elif least is not None:
        yield f"≥ {least:g}"
    if "maxLength" in schema:
        yield f"of at most {schema['maxLength']} characters"
