"""Special values, limits and field types of wire records."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, WrapValidator

MASKED = -100
"""Mask value of a token that is not trained on (torch's ignore index)."""

PROMPT_LOGPROB = 1.0
"""Logprob at prompt positions. No real logprob is positive, so it cannot be mistaken for one."""
LOGPROB_SLACK = 1e-6
"""Rounding may report a probability of 1 as a logprob this far above 0."""

MAX_TOKEN_ID = 2**31 - 1
MAX_BATCH_SIZE = 2**16
"""Limit on the sequences of one batch, because planning uses one bit per sequence."""

UNSET = -1

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
MaskValue = Annotated[int, Field(ge=MASKED, le=MAX_TOKEN_ID)]

FLOAT32_MAX = 3.4028235e38
"""The usual printed value, which is slightly larger and rounds to float32's maximum."""
MIN_TEMPERATURE = 1e-5
"""Below this temperature vLLM takes the most likely token instead of sampling. Dividing logits by a
much smaller number makes gradients overflow float32."""

Float32 = Annotated[float, Field(ge=-FLOAT32_MAX, le=FLOAT32_MAX, allow_inf_nan=False)]
"""Trainers compute in float32, in which larger numbers become infinity and then NaN."""

Count = Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)]
Step = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
BatchSize = Annotated[int, Field(ge=1, le=MAX_BATCH_SIZE)]
OptionalCount = Annotated[int, Field(ge=UNSET, le=MAX_TOKEN_ID)]
"""A count that may be unset: -1 and 0 both mean "none", as in Atropos environments."""

MAX_NAME_CHARS = 1024
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS, pattern=r"^[^\x00]*$")]
"""Stored for the whole run. A NUL would break the paths and tables that contain it."""
Directory = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]

IGNORED_WEIGHT = -1.0
"""Weight of an environment that does not share request slots, as documented by Atropos."""


def _declare_ignored(schema: dict[str, Any]) -> None:
    weight = dict(schema)
    schema.clear()
    schema["anyOf"] = [weight, {"enum": [-1, "-1"]}]


Weight = Annotated[
    float,
    Field(ge=0.0, le=1e9, allow_inf_nan=False, json_schema_extra=_declare_ignored),
    WrapValidator(lambda value, weight: IGNORED_WEIGHT if value in (-1, "-1") else weight(value)),
]

T = TypeVar("T")
Rows = Annotated[list[T], Field(fail_fast=True)]
"""A list that reports only its first invalid entry, so a million NaN are one problem."""


class WireModel(BaseModel, extra="ignore"):
    """Drops unknown fields, as Atropos does. Converts numbers if that is exact."""
