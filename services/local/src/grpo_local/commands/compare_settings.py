"""Options of `grpo-compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self, get_args

from pydantic import Field, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from grpo_core.settings import CommandSettings
from grpo_local.modes import ModeName


class CompareSettings(CommandSettings):
    """Train the same model on the same data with the same seed in each mode, and compare what it
    took: time, memory, restarts, dropped requests, reward.

    Everything behind a `--` goes to every run, which is one of grpo-demo.
    """

    model_config = SettingsConfigDict(cli_prog_name="grpo-compare", env_prefix="GRPO_COMPARE_")

    modes: Annotated[list[ModeName], NoDecode] = Field(
        list(get_args(ModeName)),
        min_length=1,
        description="modes to compare, separated by commas; one after another in this order",
    )
    steps: int = Field(40, ge=1, description="training steps of each run")
    seed: int = Field(0, ge=0, description="seed of each run")
    directory: Path | None = Field(
        None,
        description="directory for the comparison and its runs, new or empty; "
        "runs/compare-<UTC time>-<seed> when not given",
    )
    side_by_side: bool = Field(
        False,
        description="all modes at once; on one machine without GPUs they take each other's time",
    )
    gpu_ids: Annotated[list[str], NoDecode] = Field(
        [],
        description="with --side-by-side: GPU of each mode, separated by commas; a run sees no "
        "other (CUDA_VISIBLE_DEVICES)",
    )

    @field_validator("modes", "gpu_ids", mode="before")
    @classmethod
    def _split_at_commas(cls, value: Any) -> Any:
        words = [value] if isinstance(value, str) else value
        return [part for word in words for part in str(word).split(",") if part]

    @field_validator("modes")
    @classmethod
    def _each_mode_once(cls, value: list[ModeName]) -> list[ModeName]:
        return list(dict.fromkeys(value))

    @model_validator(mode="after")
    def _a_gpu_for_each_mode(self) -> Self:
        if self.gpu_ids and not self.side_by_side:
            raise ValueError("--gpu-ids is for --side-by-side")
        if self.gpu_ids and len(self.gpu_ids) != len(self.modes):
            raise ValueError(f"{len(self.gpu_ids)} --gpu-ids for {len(self.modes)} --modes")
        return self
