"""The policy version, which names one set of weights, in JSON, text and Redis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Self

from grpo_core.wire.fields import Step


class PolicyVersion(NamedTuple):
    """Names one set of weights. A restarted trainer starts a new epoch.

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
        """The inverse of `fields`, from Redis' text. Raises `KeyError`, `ValueError`."""
        return cls(int(fields["epoch"]), int(fields["step"]))

    def fields(self) -> dict[str, int]:
        return self._asdict()

    def next_epoch(self) -> Self:
        """The first version of the next epoch, which no trainer has used."""
        return type(self)(self.epoch + 1, 0)
