"""The command line of `grpo`: parsed flat, then sorted into the settings of one mode."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, Field, model_validator
from pydantic_settings import SettingsConfigDict

from grpo_core.settings import CommandSettings, load_settings
from grpo_trainer.config.sync import (
    MODES,
    CheckpointRestartSettings,
    LoraOnlySettings,
    LoraRestartSettings,
    LoraSettings,
    SharedVllmSettings,
)
from grpo_trainer.config.trainer import RunOptions, TrainerSettings

LISTS = ("--lora-target-modules", "--lora-layer-indices")
M = TypeVar("M", bound=BaseModel)


class CommandLine(
    CommandSettings,
    SharedVllmSettings,
    LoraOnlySettings,
    LoraRestartSettings,
    CheckpointRestartSettings,
    RunOptions,
):
    """GRPO trainer: takes batches from run-api, updates the policy, publishes the weights."""

    model_config = SettingsConfigDict(cli_prog_name="grpo", env_prefix="GRPO_")

    weight_bridge_mode: Literal["shared_vllm", "lora_only", "lora_restart", "none"] = Field(
        description="How new weights reach the inference server. shared_vllm: both hold one copy; "
        "lora_only: the running server loads adapters; lora_restart: it restarts with them; none: "
        "it restarts on whole checkpoints"
    )

    @model_validator(mode="after")
    def _options_fit_the_mode(self) -> Self:
        if problems := [*self._problems()]:
            raise ValueError("; ".join(problems))
        return self

    def _problems(self) -> Iterator[str]:
        mode, kind = self.weight_bridge_mode, MODES[self.weight_bridge_mode]
        of_modes = {name for other in MODES.values() for name in other.model_fields}
        for name in type(self).model_fields:
            if name in self.model_fields_set & of_modes - kind.model_fields.keys():
                yield f"--{name.replace('_', '-')}: not used in {mode}; leave it out"
        if self.redis_url is None and kind.hands_off:
            yield f"--redis-url: mode {mode} needs the Redis of the server"
        both = {"adapter_sync_interval", "vllm_restart_interval"} <= self.model_fields_set
        if both and self.adapter_sync_interval != self.vllm_restart_interval:
            yield "--adapter-sync-interval and --vllm-restart-interval: one, or the same"
        if self.master_dtype == "bfloat16" and issubclass(kind, LoraSettings):
            yield f"--master-dtype bfloat16: in {mode} an adapter is trained, in float32"
        yield from self.optimizer_conflicts()
        # Right before a publication the newest data is this old.
        oldest = self.settings().sync.publish_every_steps - 1
        if self.max_staleness is not None and self.max_staleness < oldest:
            yield (
                f"--max-staleness {self.max_staleness}: the server gets new weights every "
                f"{oldest + 1} steps, so what it samples is up to {oldest} steps old; allow that "
                "much, or publish more often"
            )

    def settings(self) -> TrainerSettings:
        """Of the mode that was chosen."""
        return self._part(TrainerSettings, sync=self._part(MODES[self.weight_bridge_mode]))

    def _part(self, kind: type[M], **parts: Any) -> M:
        held = {name: getattr(self, name) for name in kind.model_fields if name not in parts}
        return kind.model_construct(self.model_fields_set & held.keys(), **held, **parts)


def parse_settings(argv: Sequence[str]) -> TrainerSettings:
    """Those of a command line, or the process ends with status 2 and a line per mistake."""
    return load_settings(CommandLine, joined_lists(argv, LISTS)).settings()


def joined_lists(argv: Sequence[str], options: Collection[str]) -> list[str]:
    """`--lora-target-modules q_proj v_proj` → `--lora-target-modules q_proj,v_proj`.

    Args:
        options: those that take several words, as `--name-with-dashes`
    """
    joined: list[str] = []
    open_list = False
    for word in argv:
        if word.startswith("--"):
            joined.append(word)
            open_list = word.replace("_", "-") in options
        elif open_list and joined[-1].startswith("--"):
            joined.append(word)
        elif open_list:
            joined[-1] += f",{word}"
        else:
            joined.append(word)
    return joined
