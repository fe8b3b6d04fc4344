"""`grpo`, which stops at a stage of its step while a test asks it to.

The test writes the stage's name and a word of its own into a file; the trainer answers with the
same in another and waits until the first holds something else, or is gone. So a process can be
killed at exactly that moment. Nothing else differs from `grpo`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from grpo_core.run_api_client import TrainerClient
from grpo_trainer import __main__ as grpo
from grpo_trainer import state_store
from grpo_trainer.alignment import AlignmentProbe
from grpo_trainer.optimizer import MasterOptimizer

VARIABLE = "GRPO_TEST_STAGES"
WANTED, HELD = "wanted", "held"
HOLD_DEADLINE_S = 300.0
_POLL_S = 0.02

WAITING = "waiting"
"""No batch is asked for yet; the one before is trained on."""
TRAINING = "training"
"""A batch was taken and its gradients are there; no master has changed."""
PAUSED = "paused"
"""The masters have changed; the server is paused and none of its weights is written."""
HALF_WRITTEN = "half-written"
"""The server is paused and half of its weights are written."""
VERIFYING = "verifying"
"""The server goes on with the new weights; they are about to be compared."""
HALF_SAVED = "half-saved"
"""A state is being saved: its tensors are on the disk, its record is not."""
SAVED = "saved"
"""A state is saved; its batches are not acknowledged."""

STAGES = [WAITING, TRAINING, PAUSED, HALF_WRITTEN, VERIFYING]
"""Of every step."""
SAVING_STAGES = [HALF_SAVED, SAVED]
"""Of every step that saves the state."""


class Stages:
    def __init__(self, directory: Path) -> None:
        self._wanted, self._held = directory / WANTED, directory / HELD

    def reach(self, stage: str) -> None:
        asked = self._asked_for()
        if asked.partition(" ")[0] != stage:
            return
        self._held.write_text(asked)
        give_up_at = time.monotonic() + HOLD_DEADLINE_S
        while self._asked_for() == asked:
            if time.monotonic() > give_up_at:
                raise SystemExit(f"held at {stage} for more than {HOLD_DEADLINE_S} s")
            time.sleep(_POLL_S)

    def _asked_for(self) -> str:
        try:
            return self._wanted.read_text()
        except FileNotFoundError:
            return ""


def stop_at(stages: Stages) -> None:
    """Put a stop before each station of the step."""
    for owner, name, stage in (
        (TrainerClient, "next_batch", WAITING),
        (MasterOptimizer, "step", TRAINING),
        (AlignmentProbe, "measure", VERIFYING),
        (state_store, "_facts", HALF_SAVED),
        (TrainerClient, "acknowledge", SAVED),
    ):
        setattr(owner, name, _after(stages, stage, getattr(owner, name)))
    MasterOptimizer.write_into_parameters = _in_two_halves(stages)  # type: ignore[method-assign]


def _after(stages: Stages, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def stopping(*args: Any, **options: Any) -> Any:
        stages.reach(stage)
        return call(*args, **options)

    return stopping


def _in_two_halves(stages: Stages) -> Callable[[MasterOptimizer], None]:
    @torch.no_grad()
    def write(self: MasterOptimizer) -> None:
        stages.reach(PAUSED)
        pairs = list(zip(self._parameters, self.masters, strict=True))
        for parameter, master in pairs[::2]:
            parameter.copy_(master)
        stages.reach(HALF_WRITTEN)
        for parameter, master in pairs[1::2]:
            parameter.copy_(master)

    return write


if __name__ == "__main__":
    stop_at(Stages(Path(os.environ[VARIABLE])))
    grpo.main()
