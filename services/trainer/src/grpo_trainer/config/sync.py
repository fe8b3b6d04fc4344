"""Options that say how weights reach the server, and what each mode reads of them."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AliasChoices, Field, field_validator, model_validator

from grpo_core.redis.names import DEFAULT_RUN_ID
from grpo_core.redis.url import OptionalRedisUrl
from grpo_core.settings import CommandSettings
from grpo_trainer.config.cli import names_in, numbers_in

SERVED_WEIGHTS = "served_weights"


@dataclass(frozen=True)
class LoraOptions:
    """`layers`: indices of the transformer layers that get an adapter; None: all."""

    r: int
    alpha: int
    dropout: float
    target_modules: tuple[str, ...]
    layers: tuple[int, ...] | None


class ModeSettings(CommandSettings):
    """The model, and its way to the server."""

    model_name: Annotated[str, Field(validation_alias=AliasChoices("model_name", "model"))] = Field(
        description="Hub id or directory of the model to train"
    )
    weight_bridge_mode: Literal["shared_vllm", "lora_only", "lora_restart", "none"] = Field(
        description="How new weights reach the inference server. shared_vllm: both hold one copy; "
        "lora_only: the running server loads adapters; lora_restart: it restarts with them; none: "
        "it restarts on whole checkpoints"
    )

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
    adapter_sync_interval: int = Field(
        1, ge=1, description="lora_only: steps between two adapters that the server loads"
    )
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
    redis_url: OptionalRedisUrl = Field(
        None,
        description="Redis by which trainer and server speak: needed in every mode but shared_vllm "
        "(default: $REDIS_URL)",
    )
    run_id: str = Field(DEFAULT_RUN_ID, description="Name of the run (default: $RUN_ID)")

    vllm_gpu: int | None = Field(
        None,
        ge=0,
        description="GPU of a server that grpo starts, counted from 0 among those that "
        "CUDA_VISIBLE_DEVICES names (default: the first)",
    )
    gpu_memory_utilization: Annotated[
        float,
        Field(
            validation_alias=AliasChoices("gpu_memory_utilization", "vllm_gpu_memory_utilization")
        ),
    ] = Field(0.45, gt=0, le=1, description="Share of its memory that such a server may take")
    max_model_len: int | None = Field(
        None,
        ge=1,
        description="Longest sequence of such a server, in tokens (default: 4096, or what the "
        "model allows where that is less)",
    )
    vllm_flags: str = Field(
        "", description='More flags for such a server, as one string: "--enforce-eager"'
    )

    @field_validator("lora_target_modules")
    @classmethod
    def _names_modules(cls, value: str) -> str:
        return ",".join(names_in(value))

    @field_validator("lora_layer_indices")
    @classmethod
    def _names_layers(cls, value: str | None) -> str | None:
        return None if value is None else ",".join(map(str, numbers_in(value)))

    @field_validator("vllm_flags")
    @classmethod
    def _are_flags(cls, value: str) -> str:
        shlex.split(value)
        return value

    @model_validator(mode="after")
    def _options_fit_the_mode(self) -> Self:
        problems = [*self._unused(), *self._missing(), *self._intervals_that_differ()]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _unused(self) -> list[str]:
        unused = unused_options(self.mode, self.model_fields_set)
        return [f"{_option(name)}: not used in {self.mode}; leave it out" for name in unused]

    def _missing(self) -> list[str]:
        if self.redis_url is None and self.mode.hands_off:
            return [f"--redis-url: mode {self.mode} needs the Redis of the server"]
        return []

    def _intervals_that_differ(self) -> list[str]:
        both = {"adapter_sync_interval", "vllm_restart_interval"} <= self.model_fields_set
        if not both or self.adapter_sync_interval == self.vllm_restart_interval:
            return []
        return ["--adapter-sync-interval and --vllm-restart-interval: one, or the same"]

    @property
    def mode(self) -> Mode:
        return Mode(self.weight_bridge_mode)

    @property
    def lora(self) -> LoraOptions | None:
        """None where the whole model is trained."""
        if not self.mode.trains_adapter:
            return None
        layers = self.lora_layer_indices
        return LoraOptions(
            r=self.lora_r,
            alpha=self.lora_alpha,
            dropout=self.lora_dropout,
            target_modules=names_in(self.lora_target_modules),
            layers=None if layers is None else numbers_in(layers),
        )

    @property
    def publish_every_steps(self) -> int:
        """Steps between two publications."""
        if self.mode is Mode.SHARED_VLLM:
            return 1
        if self.mode is Mode.LORA_ONLY and "vllm_restart_interval" not in self.model_fields_set:
            return self.adapter_sync_interval
        return self.vllm_restart_interval


def served_weights_directory(save_path: Path) -> Path:
    """Where weights lie that are handed to the server; its --weights-dir."""
    return (save_path / SERVED_WEIGHTS).absolute()


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")


class Mode(StrEnum):
    """`--weight-bridge-mode`"""

    SHARED_VLLM = "shared_vllm"
    """Trainer and server hold one copy of the weights."""
    LORA_ONLY = "lora_only"
    """A LoRA adapter is trained; the running server loads each new one."""
    LORA_RESTART = "lora_restart"
    """A LoRA adapter is trained; the engine is restarted with it."""
    NONE = "none"
    """The whole model is trained; the engine is restarted on its checkpoint."""

    @property
    def trains_adapter(self) -> bool:
        return self in (Mode.LORA_ONLY, Mode.LORA_RESTART)

    @property
    def hands_off(self) -> bool:
        """Weights go to the server as files, by way of its supervisor."""
        return self is not Mode.SHARED_VLLM

    @property
    def restarts(self) -> bool:
        return self in (Mode.LORA_RESTART, Mode.NONE)


_LORA = frozenset({Mode.LORA_ONLY, Mode.LORA_RESTART})
_RESTART = frozenset({Mode.LORA_RESTART, Mode.NONE})
_HAND_OFF = _LORA | _RESTART
_SHARED = frozenset({Mode.SHARED_VLLM})

USED_IN: dict[str, frozenset[Mode]] = {
    "lora_r": _LORA,
    "lora_alpha": _LORA,
    "lora_dropout": _LORA,
    "lora_target_modules": _LORA,
    "lora_layer_indices": _LORA,
    "adapter_sync_interval": frozenset({Mode.LORA_ONLY}),
    "vllm_restart_interval": _HAND_OFF,
    "publish_deadline_s": _HAND_OFF,
    "vllm_flags": _RESTART,
    "pause_lease_s": _SHARED,
    "vllm_control_url": _SHARED,
    "weights_socket": _SHARED,
    "vllm_config_path": _SHARED,
    "verify_every_steps": _SHARED,
}
"""Options that not every mode reads. Given in another one they are a mistake."""

STARTS_SERVER_WITH = ("vllm_gpu", "gpu_memory_utilization", "max_model_len")
"""Read where `grpo` starts the server. Command lines of the archived trainer name them in every
mode, so in the others they are mentioned and left alone."""


def unused_options(mode: Mode, given: set[str]) -> list[str]:
    """Fields that were given and that `mode` does not read. Args: given: names of fields."""
    return [name for name, modes in USED_IN.items() if name in given and mode not in modes]
