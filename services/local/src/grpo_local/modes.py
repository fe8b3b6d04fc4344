"""The four ways of new weights to the inference server, as far as starting processes goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from grpo_core.weights.files import LORA_RANKS

ModeName = Literal["shared_vllm", "lora_only", "lora_restart", "none"]

SERVED_WEIGHTS = "served_weights"
"""Where the trainer puts what it hands off, below its save path."""


@dataclass(frozen=True)
class Mode:
    """What a mode needs of server and trainer. Without `shares_memory` weights travel as files."""

    name: ModeName
    shares_memory: bool = False
    trains_adapter: bool = False
    restarts_engine: bool = False

    @property
    def final_directory(self) -> str:
        """Where the trained weights lie in the end, below the save path."""
        return "final_adapter" if self.trains_adapter else "final_model"

    def publish_every_steps(self, restart_every_steps: int, load_every_steps: int) -> int:
        """Which of the two cadences counts in this mode."""
        if self.shares_memory:
            return 1
        return restart_every_steps if self.restarts_engine else load_every_steps

    def publication(self, every_steps: int) -> str:
        """How weights are published, in the words that the user reads."""
        what = "the new adapter" if self.trains_adapter else "the new checkpoint"
        if self.shares_memory:
            return "weights are written in place, every step"
        if not self.restarts_engine:
            return f"{what} is loaded {_every(every_steps)}, beside the running engine"
        return f"the engine restarts on {what} {_every(every_steps)}, which takes about 20 s"

    def news(self, step: int, publish_s: float) -> str | None:
        """What the user is told below the line of a step, beside its numbers."""
        if not self.restarts_engine or publish_s == 0.0:
            return None
        return f"the engine restarted on the weights of step {step}, {publish_s:.1f} s"


MODES: Mapping[ModeName, Mode] = {
    mode.name: mode
    for mode in (
        Mode("shared_vllm", shares_memory=True),
        Mode("lora_only", trains_adapter=True),
        Mode("lora_restart", trains_adapter=True, restarts_engine=True),
        Mode("none", restarts_engine=True),
    )
}


def smallest_max_lora_rank(rank: int) -> int:
    """The least value of `--max-lora-rank` that holds adapters of this rank (at most 512)."""
    return next(allowed for allowed in LORA_RANKS if allowed >= rank)


def _every(steps: int) -> str:
    return "every step" if steps == 1 else f"every {steps} steps"
