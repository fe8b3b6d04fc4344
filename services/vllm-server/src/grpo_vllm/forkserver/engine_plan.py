"""What the supervisor tells the engine process that it starts: sockets, and what to serve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from grpo_core.weights.files import WeightKind
from grpo_core.wire import PolicyVersion

UNTRAINED = PolicyVersion(epoch=0, step=0)
"""The weights of the model that the server was started with, before any trainer."""


class PlannedWeights(BaseModel):
    """`directory`: None for the model that the server was started with.

    `trained`: a trainer made them. `in_memory`: it wrote them in place, so nobody can load them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: PolicyVersion = UNTRAINED
    kind: WeightKind | None = None
    directory: Path | None = None
    sha256: str = ""
    trained: bool = False
    in_memory: bool = False

    @property
    def checkpoint(self) -> Path | None:
        return self.directory if self.kind is WeightKind.CHECKPOINT else None

    @property
    def adapter(self) -> Path | None:
        return self.directory if self.kind is WeightKind.ADAPTER else None

    @property
    def kind_name(self) -> str:
        """`kind` of `grpo_core.weights.supervisor_protocol.SupervisorStatus`."""
        if self.in_memory:
            return "memory"
        return self.kind.value if self.kind else "base"


class EnginePlan(BaseModel):
    """File descriptors are open in the process that has the plan, under these numbers.

    `channel`: a stream socket to the supervisor (see channel.py); `public`, `control`,
    `private`: listening; `parked`: connections of clients that wait to be answered.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    channel: int
    public: int
    control: int | None = None
    private: int
    parked: tuple[int, ...] = ()
    weights: PlannedWeights = Field(default_factory=PlannedWeights)

    def descriptors(self) -> tuple[int, ...]:
        """All that the engine process gets."""
        control = () if self.control is None else (self.control,)
        return (self.channel, self.public, self.private, *control, *self.parked)

    def renumbered(self, numbers: Sequence[int]) -> EnginePlan:
        """The same, where `descriptors` have other numbers, in that order."""
        rest = iter(numbers)
        return self.model_copy(
            update={
                "channel": next(rest),
                "public": next(rest),
                "private": next(rest),
                "control": None if self.control is None else next(rest),
                "parked": tuple(rest),
            }
        )
