"""Sentinels, limits and types of the values inside records."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidatorFunctionWrapHandler, WrapValidator

MASKED = -100
"""Mask value of a position that is not trained on (torch's ignore index)."""

PROMPT_LOGPROB = 1.0
"""Log-probability written at prompt positions: impossible as a value, so it cannot be confused."""

MAX_TOKEN_ID = 2**31 - 1
MAX_BATCH_SIZE = 2**16
"""Sequences in one batch. Planning an exact batch takes as many bits."""

UNSET = -1

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
MaskValue = Annotated[int, Field(ge=MASKED, le=MAX_TOKEN_ID)]

FLOAT32_MAX = 3.4028235e38
"""As it is usually printed: a little more, which is rounded to it."""
MIN_TEMPERATURE = 1e-5
"""From here on vLLM samples, below it takes the likeliest token. Gradients with respect to logits
that are divided by far less leave float32."""

Float32 = Annotated[float, Field(ge=-FLOAT32_MAX, le=FLOAT32_MAX, allow_inf_nan=False)]
"""Trainers compute in float32, where a larger number is an infinity and ends as a NaN."""

Count = Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)]
Step = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
BatchSize = Annotated[int, Field(ge=1, le=MAX_BATCH_SIZE)]
OptionalCount = Annotated[int, Field(ge=UNSET, le=MAX_TOKEN_ID)]
"""A count that may be left open: -1 and 0 both mean "none", to Atropos environments too."""

MAX_NAME_CHARS = 1024
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS, pattern=r"^[^\x00]*$")]
"""Kept for as long as the run; a NUL in it would break the paths and tables it is put into."""
Directory = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]

IGNORED_WEIGHT = -1.0
"""Of an environment that takes no part in the sharing of slots, as Atropos documents it."""


def _or_ignored(value: Any, weight: ValidatorFunctionWrapHandler) -> Any:
    return IGNORED_WEIGHT if value in (-1, "-1") else weight(value)


def _declare_ignored(schema: dict[str, Any]) -> None:
    weight = dict(schema)
    schema.clear()
    schema["anyOf"] = [weight, {"enum": [-1, "-1"]}]


Weight = Annotated[
    float,
    Field(ge=0.0, le=1e9, allow_inf_nan=False, json_schema_extra=_declare_ignored),
    WrapValidator(_or_ignored),
]

T = TypeVar("T")
Rows = Annotated[list[T], Field(fail_fast=True)]
"""A list that reports its first bad entry only: a body of a million NaN is one problem."""


class WireModel(BaseModel):
    """Unknown fields are dropped, as upstream does; numbers are coerced where nothing is lost."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
