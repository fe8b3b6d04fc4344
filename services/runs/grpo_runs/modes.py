"""The four weight-sync modes: their options, and the flags of server and trainer in each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from grpo_core.settings import CommandSettings, CommaSeparated, Shown
from grpo_core.weights.directory_checks import LORA_RANKS, SERVED_WEIGHTS, without_head

ModeName = Literal["shared_vllm", "lora_only", "lora_restart", "none"]


@dataclass(frozen=True)
class Mode:
    """Properties of a weight-sync mode. Without `shares_memory` weights travel as files."""

    name: ModeName
    shares_memory: bool = False
    trains_adapter: bool = False
    restarts_engine: bool = False

    @property
    def final_directory(self) -> str:
        """Directory of the trained weights below the save path."""
        return "final_adapter" if self.trains_adapter else "final_model"

    def publish_every_steps(self, restart_every_steps: int, load_every_steps: int) -> int:
        """Steps between two publications. The two intervals are those of the options."""
        if self.shares_memory:
            return 1
        return restart_every_steps if self.restarts_engine else load_every_steps

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


class WeightOptions(CommandSettings):
    """Options that apply to both server and trainer."""

    mode: ModeName = Field(
        "shared_vllm",
        description="Weight-sync mode, which decides how the server gets new weights. shared_vllm: "
        "trainer and server share one copy in memory. lora_only: the running server "
        "loads each new adapter. lora_restart: the engine restarts with each new "
        "adapter. none: the engine restarts with each new model",
    )
    vllm_restart_interval: Annotated[int | None, Shown(default="10")] = Field(
        None,
        ge=1,
        description="Steps between two restarts of the engine, in mode lora_restart or mode none",
    )
    adapter_sync_interval: int = Field(
        1, ge=1, description="Steps between two publications of an adapter, in mode lora_only"
    )
    lora_r: int = Field(16, ge=1, le=LORA_RANKS[-1], description="Rank of the LoRA adapter")
    lora_alpha: int = Field(
        32, ge=1, description="LoRA alpha: the adapter is scaled by this number divided by --lora-r"
    )
    lora_dropout: float = Field(
        0.0, ge=0, lt=1, description="Dropout probability of the adapter's input during training"
    )
    lora_target_modules: Annotated[
        CommaSeparated[str] | None,
        AfterValidator(without_head),
        Shown(default="q_proj,v_proj; with the tiny model every linear layer"),
    ] = Field(
        None,
        min_length=1,
        description="Names of the modules that get an adapter, separated by commas",
    )

    @property
    def weight_mode(self) -> Mode:
        return MODES[self.mode]


ADAPTER_OPTIONS = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
RESIDENT_ADAPTERS = 2
"""The newest one, and the previous one until its requests in flight are answered."""


@dataclass(frozen=True)
class HandOff:
    """How the weights of one run get from the trainer to the server.

    Args:
        restart_every_steps: for modes that restart the engine
        target_modules: layers with an adapter; empty: the trainer's default
        weights_socket: for `shared_vllm`
        bridge_config: for `shared_vllm`
    """

    options: WeightOptions
    restart_every_steps: int
    target_modules: tuple[str, ...]
    redis_url: str = field(repr=False)
    run_id: str
    save_path: Path
    weights_socket: Path
    bridge_config: Path

    @property
    def weights_directory(self) -> Path:
        """Absolute, so that server and trainer mean the same directory."""
        return (self.save_path / SERVED_WEIGHTS).absolute()

    def make_directories(self) -> None:
        """Call it before the server starts, which requires its weights directory to exist."""
        if not self.options.weight_mode.shares_memory:
            self.weights_directory.mkdir(parents=True, exist_ok=True)

    def environment(self) -> dict[str, str]:
        """For server and trainer. The URL may hold a password, and other users can read command
        lines."""
        return {"REDIS_URL": self.redis_url}

    def server_flags(self) -> list[str]:
        mode = self.options.weight_mode
        flags = ["--run-id", self.run_id]
        if mode.shares_memory:
            flags += ["--share-weights", "--weights-socket", str(self.weights_socket)]
            flags += ["--bridge-config-path", str(self.bridge_config)]
        else:
            # A variable such as VLLM_ENABLE_SHARED_WEIGHTS may say otherwise.
            flags += ["--no-share-weights", "--weights-dir", str(self.weights_directory)]
        if mode.trains_adapter:
            flags += ["--enable-lora", "--max-loras", str(RESIDENT_ADAPTERS)]
            holds_rank = next(rank for rank in LORA_RANKS if rank >= self.options.lora_r)
            flags += ["--max-lora-rank", str(holds_rank)]
        return flags

    def trainer_flags(self) -> list[str]:
        mode, options = self.options.weight_mode, self.options
        flags = ["--mode", mode.name, "--save-path", str(self.save_path)]
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
