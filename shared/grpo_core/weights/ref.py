"""Describes one set of weights: policy version, kind (such as adapter) and directory."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel

from grpo_core.wire.policy_version import PolicyVersion

UNTRAINED = PolicyVersion(epoch=0, step=0)
"""The weights of the model that the server was started with, before any trainer."""


class WeightKind(StrEnum):
    """Where weights are stored, and in which form."""

    BASE = "base"
    """The model that the server was started with."""
    ADAPTER = "adapter"
    """A directory with a LoRA adapter for that model, in PEFT's format."""
    CHECKPOINT = "checkpoint"
    """A directory with a whole model and its tokenizer, in transformers' format."""
    MEMORY = "memory"
    """Only in shared memory: a trainer wrote them there."""


class WeightRef(BaseModel, frozen=True, extra="forbid"):
    """One set of weights.

    `path`: a complete directory that does not change any more; None if there is none. `digest`: its
    `directory_digest`, "" if it is unknown.
    """

    version: PolicyVersion = UNTRAINED
    kind: WeightKind = WeightKind.BASE
    path: Path | None = None
    digest: str = ""

    @property
    def trained(self) -> bool:
        """Whether a trainer made these weights."""
        return self.kind is not WeightKind.BASE

    @property
    def checkpoint(self) -> Path | None:
        return self.path if self.kind is WeightKind.CHECKPOINT else None

    @property
    def adapter(self) -> Path | None:
        return self.path if self.kind is WeightKind.ADAPTER else None
