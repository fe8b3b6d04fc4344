"""Options of each weight-sync mode: one class per mode, with only that mode's options."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, field_validator

from grpo_core.settings import CommaSeparated, HttpUrl, Shown
from grpo_core.settings.command import split_at_commas
from grpo_core.weights.directory_checks import SERVED_WEIGHTS, without_head

ModeName = Literal["shared_vllm", "lora_only", "lora_restart", "none"]

SERVED_KEPT = 2
"""Directories of weights that are kept: the served weights, and those to roll back to."""
RESTART_EVERY_STEPS = 3
"""The default of --vllm-restart-interval where the engine restarts on new weights."""
_RANGE = re.compile(r"(\d+)-(\d+)")
_EXPECTED_LAYERS = "expected layer numbers or ranges, separated by commas, for example 0-3,28-31"


def _numbers_in(value: Any) -> tuple[int, ...]:
    """`20-31`, or `0-3` and `28-31`: in order and each once.

    Raises:
        ValueError: something else, or nothing
    """
    numbers: set[int] = set()
    for part in split_at_commas(value):
        found = _RANGE.fullmatch(part)
        first, last = (int(found[1]), int(found[2])) if found else (_number(part),) * 2
        if first > last:
            raise ValueError(
                f"{part}: the first number of a range must not be above the second number"
            )
        numbers.update(range(first, last + 1))
    if not numbers:
        raise ValueError(_EXPECTED_LAYERS)
    return tuple(sorted(numbers))


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r}: {_EXPECTED_LAYERS}")
    return int(text)


Layers = Annotated[tuple[int, ...], BeforeValidator(_numbers_in)]
"""Numbers of layers."""


@dataclass(frozen=True)
class LoraOptions:
    """Shape of the adapter. `layers`: indices of the layers that get one; None means all."""

    r: int
    alpha: int
    dropout: float
    target_modules: tuple[str, ...]
    layers: tuple[int, ...] | None


class ModeOptions(BaseModel, frozen=True):
    """Options of one weight-sync mode. `uses_files`: weights travel as files, and inference servers
    follow the versions that the trainer announces."""

    uses_files: ClassVar[bool] = True

    mode: ModeName

    @property
    def restarts_engine(self) -> bool:
        """Whether an engine restarts on new weights."""
        return False


class FullModelSettings(ModeOptions):
    """The model's own weights are trained."""

    train_layer_indices: Annotated[
        Layers | None, Shown(default="the whole model", metavar="RANGES")
    ] = Field(
        None,
        description="Numbers of the transformer layers to train, for example 20-31 or 0-3,28-31. "
        "All other weights are frozen, the embeddings and the output head too",
    )


class SharedVllmSettings(FullModelSettings):
    """Trainer and server share one copy of the weights."""

    uses_files = False

    mode: ModeName = "shared_vllm"
    vllm_control_url: Annotated[HttpUrl | None, Shown(default="the inference URL")] = Field(
        None, description="URL of the server's control port, if the server has one"
    )
    weights_socket: Annotated[Path | None, Shown(default="the path that the server reports")] = (
        Field(None, description="Unix socket through which the server shares its weights")
    )
    vllm_config_path: Annotated[
        Path | None, Shown(default="searched for in $LOGDIR, . and /tmp/atropos_bridge")
    ] = Field(
        None,
        description="Path of the server's vllm_bridge_config.json. Needed if the trainer cannot "
        "open the weight socket at the path that the server reports",
    )
    pause_lease_s: float = Field(
        30.0,
        gt=0,
        description="Seconds after which the server ends a pause if the trainer has not finished "
        "its update",
    )
    verify_every_steps: int = Field(
        10,
        ge=0,
        description="In mode shared_vllm: steps between two comparisons of the server's logprobs "
        "with the trainer's; 0 turns the comparisons off. Every other mode compares after "
        "every publication",
    )

    @property
    def publish_every_steps(self) -> int:
        return 1


class LoraSettings(ModeOptions):
    """An adapter is trained."""

    lora_r: int = Field(16, ge=1, description="Rank of the LoRA adapter")
    lora_alpha: int = Field(
        32, ge=1, description="LoRA alpha: the adapter is scaled by this number divided by --lora-r"
    )
    lora_dropout: float = Field(
        0.0, ge=0, lt=1, description="Dropout probability of the adapter's input during training"
    )
    lora_target_modules: Annotated[CommaSeparated[str], AfterValidator(without_head)] = Field(
        ("q_proj", "v_proj"),
        min_length=1,
        description="Names of the modules that get an adapter, separated by commas or spaces. "
        "all-linear: all linear layers but the head",
    )
    lora_layer_indices: Annotated[Layers | None, Shown(default="all layers", metavar="RANGES")] = (
        Field(
            None,
            description="Numbers of the layers that get an adapter, for example 20-31 or 0-3,28-31",
        )
    )

    @property
    def lora(self) -> LoraOptions:
        return LoraOptions(
            r=self.lora_r,
            alpha=self.lora_alpha,
            dropout=self.lora_dropout,
            target_modules=tuple(dict.fromkeys(self.lora_target_modules)),
            layers=self.lora_layer_indices,
        )


class HandOffSettings(ModeOptions):
    """Weights reach the server as files."""

    vllm_restart_interval: Annotated[
        int | None, Shown(default="1 in mode none with --publish update, otherwise 3")
    ] = Field(
        None,
        ge=1,
        description="In modes lora_restart and none: steps between two publications. "
        "In mode lora_only: another name for --adapter-sync-interval",
    )
    publish_wait_s: float = Field(
        10.0,
        ge=0,
        description="Seconds for which a publication waits for all inference servers. After this "
        "time training goes on if at least one server serves the new weights",
    )
    publish_deadline_s: float = Field(
        600.0,
        gt=0,
        description="Seconds to wait until the first server serves a publication, including a "
        "restart of the engine. After this time the trainer ends with an error",
    )

    @property
    def publish_every_steps(self) -> int:
        return self.vllm_restart_interval or (RESTART_EVERY_STEPS if self.restarts_engine else 1)


class TransportSettings(BaseModel):
    """How a version reaches engines that load it while they run."""

    weight_transport: Literal["files", "collective"] = Field(
        "files",
        description="In modes lora_only and none, how new weights travel. files: as files, on a "
        "shared disk or by HTTP. collective: through one process group of the trainer and the "
        "workers of all inference servers, with NCCL on GPUs and gloo on CPUs. A server outside "
        "the group takes a version from another server, or as files",
    )


class LoraOnlySettings(HandOffSettings, LoraSettings, TransportSettings):
    """The running server loads each new adapter."""

    mode: ModeName = "lora_only"
    adapter_sync_interval: int = Field(
        1, ge=1, description="Steps between two publications of an adapter, in mode lora_only"
    )

    @property
    def publish_every_steps(self) -> int:
        return self.vllm_restart_interval or self.adapter_sync_interval


class RestartSettings(HandOffSettings):
    """`grpo` may start the server itself."""

    vllm_flags: str = Field(
        "",
        description="Further options for a server that grpo starts, in one string: "
        "--vllm-flags='--enforce-eager --block-size 16'",
    )

    @field_validator("vllm_flags")
    @classmethod
    def _are_flags(cls, value: str) -> str:
        shlex.split(value)
        return value


class LoraRestartSettings(RestartSettings, LoraSettings):
    """The engine restarts with each new adapter."""

    mode: ModeName = "lora_restart"

    @property
    def restarts_engine(self) -> bool:
        return True


class CheckpointRestartSettings(RestartSettings, FullModelSettings, TransportSettings):
    """The whole model is trained, and the server loads each new copy of it."""

    mode: ModeName = "none"
    publish: Literal["update", "restart"] = Field(
        "update",
        description="In mode none, how a server takes new weights. update: the running engine "
        "loads them, and requests in flight wait for less than a second. restart: the engine "
        "restarts, which takes seconds and pays only with a high --vllm-restart-interval",
    )

    @property
    def restarts_engine(self) -> bool:
        return self.publish == "restart"


SyncSettings = (
    SharedVllmSettings | LoraOnlySettings | LoraRestartSettings | CheckpointRestartSettings
)
KINDS: dict[str, type[SyncSettings]] = {
    kind.model_fields["mode"].default: kind for kind in get_args(SyncSettings)
}


def served_weights_directory(save_path: Path) -> Path:
    """Directory of the weights that the server loads; the server's --weights-dir."""
    return (save_path / SERVED_WEIGHTS).absolute()
