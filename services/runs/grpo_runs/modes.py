"""The four weight-sync modes, and what follows from each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from grpo_core.tree.weights import KINDS, LoraSettings, ModeName, SyncSettings
from grpo_core.weights.directory_checks import FINAL_ADAPTER, FINAL_MODEL


@dataclass(frozen=True)
class Mode:
    """Properties of a weight-sync mode. Without `shares_memory` weights travel as files."""

    name: ModeName
    shares_memory: bool
    trains_adapter: bool
    restarts_engine: bool

    @classmethod
    def of(cls, sync: SyncSettings) -> Mode:
        trains_adapter = isinstance(sync, LoraSettings)
        return cls(sync.mode, not sync.uses_files, trains_adapter, sync.restarts_engine)

    @property
    def final_directory(self) -> str:
        """Directory of the trained weights below the save path."""
        return FINAL_ADAPTER if self.trains_adapter else FINAL_MODEL

    @property
    def loads_adapters(self) -> bool:
        """The running server loads them."""
        return self.trains_adapter and not self.restarts_engine

    def publication(self, every_steps: int) -> str:
        """How weights are published, for the user."""
        what = "adapter" if self.trains_adapter else "model"
        if self.shares_memory:
            return "server and trainer share one copy of the weights, updated after every step"
        if not self.restarts_engine:
            return f"the running server loads the new {what} after {_every(every_steps)}"
        return f"the server's engine restarts with the new {what} after {_every(every_steps)}"

    def news(self, step: int, publish_s: float) -> str | None:
        """The line below a step in which the engine was restarted."""
        if not self.restarts_engine or publish_s == 0.0:
            return None
        return f"the engine restarted with the weights of step {step} in {publish_s:.1f} s"


MODES: Mapping[ModeName, Mode] = {
    mode.name: mode for mode in (Mode.of(kind()) for kind in KINDS.values())
}
"""In mode none, the engine restarts with --publish restart."""


def _every(steps: int) -> str:
    return "every step" if steps == 1 else f"every {steps} steps"
