"""What server and trainer are told about the mode. Both get the same rank, paths and run id."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from grpo_local.mode_options import ModeOptions
from grpo_local.modes import SERVED_WEIGHTS, smallest_max_lora_rank

RESIDENT_ADAPTERS = 2
"""The one that is served, and the one before, on which requests in flight finish."""

Flags = list[str]


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

    def server_flags(self) -> Flags:
        mode = self.options.weight_mode
        flags: Flags = ["--run-id", self.run_id]
        if mode.shares_memory:
            flags += ["--share-weights", "--weights-socket", str(self.weights_socket)]
            flags += ["--bridge-config-path", str(self.bridge_config)]
        else:
            flags += ["--weights-dir", str(self.weights_directory)]
        if mode.trains_adapter:
            flags += ["--enable-lora", "--max-loras", str(RESIDENT_ADAPTERS)]
            flags += ["--max-lora-rank", str(smallest_max_lora_rank(self.options.lora_r))]
        return flags

    def trainer_flags(self) -> Flags:
        mode, options = self.options.weight_mode, self.options
        flags: Flags = ["--weight-bridge-mode", mode.name, "--save-path", str(self.save_path)]
        if mode.shares_memory:
            return [*flags, "--weights-socket", str(self.weights_socket)]
        flags += ["--run-id", self.run_id]
        if mode.restarts_engine:
            flags += ["--vllm-restart-interval", str(self.restart_every_steps)]
        else:
            flags += ["--adapter-sync-interval", str(options.adapter_sync_interval)]
        return flags + (self._adapter_flags() if mode.trains_adapter else [])

    def _adapter_flags(self) -> Flags:
        options = self.options
        flags: Flags = ["--lora-r", str(options.lora_r), "--lora-alpha", str(options.lora_alpha)]
        flags += ["--lora-dropout", str(options.lora_dropout)]
        return flags + (["--lora-target-modules", *self.target_modules] * bool(self.target_modules))
