"""Options that say how new weights reach the server; `grpo-demo` and `grpo-run` have them both."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator
from pydantic_settings import NoDecode

from grpo_core.settings import CommandSettings
from grpo_core.weights.files import LORA_RANKS
from grpo_local.modes import MODES, Mode, ModeName


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
    # NoDecode: commas instead of JSON, in a variable as on the command line.
    lora_target_modules: Annotated[list[str] | None, NoDecode] = Field(
        None,
        min_length=1,
        description="layers that get an adapter, separated by commas",
    )

    @property
    def weight_mode(self) -> Mode:
        return MODES[self.mode]

    @field_validator("lora_target_modules", mode="before")
    @classmethod
    def _split_names(cls, value: Any) -> Any:
        if value is None:
            return None
        words = [value] if isinstance(value, str) else value
        return [name for word in words for name in str(word).replace(",", " ").split()]
