"""JSON Schema of what pydantic accepts from JSON: a number may also be text or a boolean."""

from __future__ import annotations

import sys
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import FloatSchema, IntSchema, ModelSchema

_MOST_DIGITS = 9
_FRACTION = r"(\.[0-9]{1,17})?"


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
