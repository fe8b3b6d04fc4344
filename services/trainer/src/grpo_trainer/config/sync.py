"""How weights reach the server: one class of options per mode, with no option that the mode does
not read."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

SERVED_WEIGHTS = "served_weights"
SERVED_KEPT = 2
"""Directories of weights: what is served, and what the server goes back to if that fails."""
_PARTS = re.compile(r"[,\s]+")
_RANGE = re.compile(r"(\d+)-(\d+)")


@dataclass(frozen=True)
class LoraOptions:
    """How the adapter is made. `layers`: indices of the transformer layers that get an adapter;
    None: all."""

    r: int
    alpha: int
    dropout: float
    target_modules: tuple[str, ...]
    layers: tuple[int, ...] | None


class ModeOptions(BaseModel):
    """`mode`: as --weight-bridge-mode names it. `hands_off`: weights go to the server as files, by
    way of its supervisor."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    mode: ClassVar[str]
    hands_off: ClassVar[bool] = True


class SharedVllmSettings(ModeOptions):
    """Trainer and server hold one copy of the weights."""

    mode = "shared_vllm"
    hands_off = False

    vllm_control_url: str | None = Field(
        None,
        description="URL of the server's control port, where it has one (default: its own URL)",
    )
    weights_socket: Path | None = Field(
        None, description="Unix socket of the server's weights (default: what the server names)"
    )
    vllm_config_path: Path | None = Field(
        None,
        description="vllm_bridge_config.json of the server, where the socket that the server names "
        "is not on this file system (default: looked for in $LOGDIR, . and /tmp/atropos_bridge)",
    )
    pause_lease_s: float = Field(
        30.0, gt=0, description="Seconds after which the server goes on if an update hangs"
    )
    verify_every_steps: int = Field(
        10,
        ge=0,
        description="shared_vllm: compare served and trained log-probabilities after the first "
        "update and then every so many steps; 0: never. The other modes compare after every "
        "publication",
    )

    @property
    def publish_every_steps(self) -> int:
        return 1


class LoraSettings(ModeOptions):
    """An adapter is trained."""

    lora_r: int = Field(16, ge=1, description="Rank of the adapter")
    lora_alpha: int = Field(32, ge=1, description="The adapter counts lora_alpha / lora_r times")
    lora_dropout: float = Field(
        0.05, ge=0, lt=1, description="Dropout before the adapter, while gradients are computed"
    )
    lora_target_modules: str = Field(
        "q_proj,v_proj", description="Modules that get an adapter, separated by spaces or commas"
    )
    lora_layer_indices: str | None = Field(
        None, description="Layers that get one, for example 20-31 or 0-3,28-31 (default: all)"
    )

    @field_validator("lora_target_modules")
    @classmethod
    def _names_modules(cls, value: str) -> str:
        return ",".join(_names_in(value))

    @field_validator("lora_layer_indices")
    @classmethod
    def _names_layers(cls, value: str | None) -> str | None:
        return None if value is None else ",".join(map(str, _numbers_in(value)))

    @property
    def lora(self) -> LoraOptions:
        layers = self.lora_layer_indices
        return LoraOptions(
            r=self.lora_r,
            alpha=self.lora_alpha,
            dropout=self.lora_dropout,
            target_modules=_names_in(self.lora_target_modules),
            layers=None if layers is None else _numbers_in(layers),
        )


class HandOffSettings(ModeOptions):
    """Weights reach the server as files."""

    vllm_restart_interval: int = Field(
        3,
        ge=1,
        description="lora_restart, none: steps between two restarts of the engine. In lora_only it "
        "means --adapter-sync-interval, where it is given",
    )
    publish_deadline_s: float = Field(
        600.0,
        gt=0,
        description="Seconds that the server may take to serve new weights, a restart included",
    )

    @property
    def publish_every_steps(self) -> int:
        return self.vllm_restart_interval


class LoraOnlySettings(HandOffSettings, LoraSettings):
    """The running server loads each new adapter."""

    mode = "lora_only"

    adapter_sync_interval: int = Field(
        1, ge=1, description="lora_only: steps between two adapters that the server loads"
    )

    @property
    def publish_every_steps(self) -> int:
        given = "vllm_restart_interval" in self.model_fields_set
        return self.vllm_restart_interval if given else self.adapter_sync_interval


class RestartSettings(HandOffSettings):
    """The engine restarts on the new weights."""

    vllm_flags: str = Field(
        "", description='More flags for such a server, as one string: "--enforce-eager"'
    )

    @field_validator("vllm_flags")
    @classmethod
    def _are_flags(cls, value: str) -> str:
        shlex.split(value)
        return value


class LoraRestartSettings(RestartSettings, LoraSettings):
    """The engine restarts with each new adapter."""

    mode = "lora_restart"


class CheckpointRestartSettings(RestartSettings):
    """The whole model is trained; the engine restarts on its checkpoint."""

    mode = "none"


SyncSettings = (
    SharedVllmSettings | LoraOnlySettings | LoraRestartSettings | CheckpointRestartSettings
)
MODES: dict[str, type[SyncSettings]] = {
    kind.mode: kind
    for kind in (
        SharedVllmSettings,
        LoraOnlySettings,
        LoraRestartSettings,
        CheckpointRestartSettings,
    )
}


def served_weights_directory(save_path: Path) -> Path:
    """Where weights lie that are handed to the server; its --weights-dir."""
    return (save_path / SERVED_WEIGHTS).absolute()


def _names_in(text: str) -> tuple[str, ...]:
    """`q_proj v_proj` or `q_proj,v_proj`. Raises ValueError where there is none."""
    names = tuple(dict.fromkeys(part for part in _PARTS.split(text) if part))
    if not names:
        raise ValueError("expected at least one name")
    return names


def _numbers_in(text: str) -> tuple[int, ...]:
    """`20-31`, `0,1,2`, `0-3,28-31`, in order and each once.

    Raises:
        ValueError: something else, or nothing.
    """
    numbers: set[int] = set()
    for part in filter(None, _PARTS.split(text)):
        found = _RANGE.fullmatch(part)
        first, last = (int(found[1]), int(found[2])) if found else (_number(part),) * 2
        if first > last:
            raise ValueError(f"{part}: a range goes from the lower to the higher number")
        numbers.update(range(first, last + 1))
    if not numbers:
        raise ValueError("expected numbers and ranges, for example 0-3,28-31")
    return tuple(sorted(numbers))


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r}: expected numbers and ranges, for example 0-3,28-31")
    return int(text)
