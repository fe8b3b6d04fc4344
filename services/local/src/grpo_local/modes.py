"""The four modes of new weights to the inference server: options, and flags of both processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from grpo_core.settings import CommandSettings
from grpo_core.weights.directory_checks import LORA_RANKS

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


def _every(steps: int) -> str:
    return "every step" if steps == 1 else f"every {steps} steps"


def comma_separated(value: Any) -> Any:
    """`a,b` → `["a", "b"]`, on the command line and in a variable."""
    if value is None:
        return None
    words = [value] if isinstance(value, str) else value
    return [part for word in words for part in str(word).replace(",", " ").split()]


class ModeOptions(CommandSettings):
    """Rank and mode are said once, for server and trainer alike."""

    mode: ModeName = Field(
        "shared_vllm",
        description="how new weights reach the server. shared_vllm: server and trainer hold one "
        "copy; lora_only: adapters, loaded beside the running engine; lora_restart: adapters, the "
        "engine restarts with them; none: checkpoints, the engine restarts on them",
    )
    vllm_restart_interval: int | None = Field(
        None,
        ge=1,
        description="steps between two restarts of the engine in lora_restart and none",
    )
    adapter_sync_interval: int = Field(
        1, ge=1, description="steps between two adapters that are loaded in lora_only"
    )
    lora_r: int = Field(
        16, ge=1, le=LORA_RANKS[-1], description="rank of the adapter in the LoRA modes"
    )
    lora_alpha: int = Field(32, ge=1, description="scale of the adapter, times its rank")
    lora_dropout: float = Field(
        0.05, ge=0, lt=1, description="dropout before the adapter while training"
    )
    lora_target_modules: Annotated[list[str] | None, BeforeValidator(comma_separated)] = Field(
        None,
        min_length=1,
        description="layers that get an adapter, separated by commas",
    )

    @property
    def weight_mode(self) -> Mode:
        return MODES[self.mode]


RESIDENT_ADAPTERS = 2
"""The one that is served, and the one before, on which requests in flight finish."""


@dataclass(frozen=True)
class HandOff:
    """How one run's weights travel.

    Args:
        options: the mode, and the sizes of its adapter
        restart_every_steps: used where the engine restarts
        target_modules: used where an adapter is trained; empty: the trainer's default
        save_path: of the trainer
        weights_socket: used where memory is shared
        bridge_config: used where memory is shared
    """

    options: ModeOptions
    restart_every_steps: int
    target_modules: tuple[str, ...]
    redis_url: str = field(repr=False)
    run_id: str
    save_path: Path
    weights_socket: Path
    bridge_config: Path

    @property
    def weights_directory(self) -> Path:
        """Absolute, since server and trainer must read the same thing out of it."""
        return (self.save_path / SERVED_WEIGHTS).absolute()

    def make_directories(self) -> None:
        """Before the server starts: it takes weights from a directory that is there."""
        if not self.options.weight_mode.shares_memory:
            self.weights_directory.mkdir(parents=True, exist_ok=True)

    def environment(self) -> dict[str, str]:
        """For both. A URL may hold a password, and everybody may read a command line."""
        return {"REDIS_URL": self.redis_url}

    def server_flags(self) -> list[str]:
        mode = self.options.weight_mode
        flags = ["--run-id", self.run_id]
        if mode.shares_memory:
            flags += ["--share-weights", "--weights-socket", str(self.weights_socket)]
            flags += ["--bridge-config-path", str(self.bridge_config)]
        else:
            flags += ["--weights-dir", str(self.weights_directory)]
        if mode.trains_adapter:
            flags += ["--enable-lora", "--max-loras", str(RESIDENT_ADAPTERS)]
            holds_rank = next(rank for rank in LORA_RANKS if rank >= self.options.lora_r)
            flags += ["--max-lora-rank", str(holds_rank)]
        return flags

    def trainer_flags(self) -> list[str]:
        mode, options = self.options.weight_mode, self.options
        flags = ["--weight-bridge-mode", mode.name, "--save-path", str(self.save_path)]
        if mode.shares_memory:
            return [*flags, "--weights-socket", str(self.weights_socket)]
        flags += ["--run-id", self.run_id]
        if mode.restarts_engine:
            flags += ["--vllm-restart-interval", str(self.restart_every_steps)]
        else:
            flags += ["--adapter-sync-interval", str(options.adapter_sync_interval)]
        return flags + (self._adapter_flags() if mode.trains_adapter else [])

    def _adapter_flags(self) -> list[str]:
        options = self.options
        flags = ["--lora-r", str(options.lora_r), "--lora-alpha", str(options.lora_alpha)]
        flags += ["--lora-dropout", str(options.lora_dropout)]
        return flags + (["--lora-target-modules", *self.target_modules] * bool(self.target_modules))
