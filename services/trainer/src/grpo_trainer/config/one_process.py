"""Options of the archived trainer for several processes. Only their defaults are valid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, Field, ValidationInfo, field_validator

T = TypeVar("T", int, str)

_ONE_PROCESS = "a run has one trainer process; --device selects its GPU"
_REASONS: Mapping[str, str] = {
    "trainer_rank": _ONE_PROCESS,
    "world_size": _ONE_PROCESS,
    "init_method": _ONE_PROCESS,
    "num_inference_nodes": "0 means one inference server, and only one server of a run can receive "
    "new weights; --inference-url names this server",
}


class OneProcessOptions(BaseModel):
    """Options that a command line of the archived trainer may contain."""

    trainer_rank: int = Field(0, description="Only 0 is valid: a run has one trainer process")
    world_size: int = Field(1, description="Only 1 is valid: a run has one trainer process")
    init_method: str = Field(
        "env://", description="Only env:// is valid: a run has one trainer process"
    )
    num_inference_nodes: int = Field(
        0,
        description="Only 0 is valid. 0 means one inference server, and only one server of a run "
        "can receive new weights",
    )

    @field_validator(*_REASONS)
    @classmethod
    def _is_default(cls, value: T, info: ValidationInfo) -> T:
        name = info.field_name or ""
        default = cls.model_fields[name].default
        if value != default:
            reason = _REASONS[name]
            raise ValueError(f"the only valid value is {default}, because {reason}")
        return value
