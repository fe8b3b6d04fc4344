"""One record for a set of weights, wherever it is planned, commanded, served or stored."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from grpo_core.wire.policy_version import PolicyVersion

UNTRAINED = PolicyVersion(epoch=0, step=0)
"""The weights of the model that the server was started with, before any trainer."""


class WeightKind(StrEnum):
    """Where weights are, and what a directory of them holds."""

    BASE = "base"
    """The model that the server was started with."""
    ADAPTER = "adapter"
    """A directory: a LoRA adapter as PEFT saves it, to be put on that model."""
    CHECKPOINT = "checkpoint"
    """A directory: a whole model with its tokenizer, as transformers saves it."""
    MEMORY = "memory"
    """A trainer wrote them in place: they are in the server's memory alone."""


class WeightRef(BaseModel):
    """`path`: of a directory that is complete and will not change; None where there is none.

    `digest`: `directory_digest` of it, "" where it is not known.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: PolicyVersion = UNTRAINED
    kind: WeightKind = WeightKind.BASE
    path: Path | None = None
    digest: str = ""

    @property
    def trained(self) -> bool:
        """A trainer made them."""
        return self.kind is not WeightKind.BASE

    @property
    def checkpoint(self) -> Path | None:
        return self.path if self.kind is WeightKind.CHECKPOINT else None

    @property
    def adapter(self) -> Path | None:
        return self.path if self.kind is WeightKind.ADAPTER else None
