"""What the supervisor tells the engine process that it starts: sockets, and what to serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from grpo_core.weights.ref import WeightRef


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
    weights: WeightRef = Field(default_factory=WeightRef)

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
