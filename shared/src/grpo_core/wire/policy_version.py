"""The name of one set of weights, in each form that it has on a wire or in Redis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Self

from grpo_core.wire.fields import Step


class PolicyVersion(NamedTuple):
    """Names one set of weights: a trainer that starts again opens a new epoch.

    In JSON it is the list `[3, 12]`, in text `3.12`, in Redis two fields of a hash.
    """

    epoch: Step
    step: Step

    def __str__(self) -> str:
        return f"{self.epoch}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str`. Raises `ValueError`."""
        epoch, step = text.split(".")
        return cls(int(epoch), int(step))

    @classmethod
    def from_fields(cls, fields: Mapping[str, str]) -> Self:
        """The inverse of `fields`, as Redis answers. Raises `KeyError`, `ValueError`."""
        return cls(int(fields["epoch"]), int(fields["step"]))

    def fields(self) -> dict[str, int]:
        return self._asdict()

    def next_epoch(self) -> Self:
        """The first name of the epoch after this one: no trainer has used it."""
        return type(self)(self.epoch + 1, 0)
