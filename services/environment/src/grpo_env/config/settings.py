"""Settings of `env-server`: what to run, how to pace it, where the policy is served.

Names follow Atropos, so that its command lines and YAML files carry over.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)
from pydantic_settings import CliExplicitFlag, CliPositionalArg, SettingsConfigDict

from grpo_core.security.bearer_token import usable_token
from grpo_core.settings import EXIT_USAGE, CommandSettings, load_settings
from grpo_core.wire.fields import Weight
from grpo_env.config.file import ConfigFileUnusable, config_argument, read_config_file

PROG = "env-server"
TaskName = Literal["arithmetic", "gsm8k"]


def _absolute_url(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise ValueError("write the URL with its scheme, for example http://localhost:8000")
    return value


Url = Annotated[str, AfterValidator(_absolute_url)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class EnvSettings(_Section):
    """How groups are sampled, paced and sent."""

    rollout_server_url: Url = Field("http://localhost:8000", description="URL of run-api")
    group_size: int = Field(8, ge=1, description="Completions sampled for one prompt (sequences)")
    max_token_length: int = Field(
        2048,
        ge=2,
        description="Groups with a sequence (prompt + completion) of this many tokens or more "
        "are dropped; the trainer's own limit applies where it is smaller (tokens)",
    )
    max_completion_tokens: int | None = Field(
        None,
        ge=1,
        description="Sampling stops after this many tokens and the answer is graded as it "
        "stands; unset: the task's own limit (tokens)",
    )
    temperature: float = Field(
        1.0, gt=0.0, allow_inf_nan=False, description="Sampling temperature (no unit)"
    )
    total_steps: int = Field(
        -1,
        ge=-1,
        description="Stop once the trainer has received the batch of this step; "
        "-1: the number of steps that the trainer registered (steps)",
    )
    max_batches_offpolicy: int = Field(
        3,
        ge=1,
        description="Sequences queued or being sampled never exceed this many batches: more "
        "keeps the trainer busier, fewer keeps the data fresher (batches)",
    )
    max_concurrent_groups: int = Field(
        8, ge=1, le=64, description="Groups sampled at once by all environments (groups)"
    )
    drop_equal_scores: CliExplicitFlag[bool] = Field(
        True,
        description="Drop groups whose scores are all equal: their advantages are zero, so they "
        "teach nothing and cost a training step. Their rewards still count in the reported mean. "
        "The share dropped grows as the policy gets better and is logged (true or false)",
    )
    tokenizer_name: str | None = Field(
        None, description="Hub id or directory of the tokenizer; unset: openai.model-name"
    )
    data: str | None = Field(
        None,
        min_length=1,
        description="Data of the task (gsm8k): directory with train.jsonl, or id of a data set on "
        "the hub; unset: openai/gsm8k",
    )
    data_config: str | None = Field(
        None, description="Configuration of a data set on the hub; unset: main"
    )
    format_reward: float = Field(
        0.3,
        ge=0.0,
        lt=1.0,
        allow_inf_nan=False,
        description="Largest share for the form of an answer (gsm8k), beside 1 for the right one; "
        "0: only the right answer counts (score)",
    )
    wandb_name: str | None = Field(
        None, min_length=1, description="Name under which metrics are reported; unset: the task's"
    )
    weight: Weight = Field(
        1.0,
        description="Share of the sampling slots, relative to the other environments (no unit); "
        "-1: all of them, and the others share theirs without this one",
    )
    min_batch_allocation: float | None = Field(
        None,
        ge=0.0,
        le=1.0,
        allow_inf_nan=False,
        description="Share of every batch that is this environment's at least; batches wait for "
        "it; unset: none (0 to 1)",
    )
    seed: int = Field(0, description="Seed of the order of the prompts")
    run_api_deadline_s: float = Field(
        120.0, gt=0.0, description="How long run-api may be unreachable (seconds)"
    )
    trainer_deadline_s: float = Field(
        1800.0,
        gt=0.0,
        description="How long to wait for a trainer to register, or to take the next batch from a "
        "full queue (seconds)",
    )
    next_run_deadline_s: float = Field(
        0.0,
        ge=0.0,
        description="How long to wait for a trainer that goes on, where this environment finds the "
        "run complete (seconds)",
    )
    ready_file: Path | None = Field(
        None,
        description="File that is there as long as this environment works or waits for a trainer, "
        "for the health check of a container; unset: none",
    )

    @model_validator(mode="after")
    def _some_group_can_be_sent(self) -> Self:
        if self.group_size == 1 and self.drop_equal_scores:
            raise ValueError(
                "the scores of a group of 1 are always equal, so every group would be dropped; "
                "pass --env.group-size 2 or more, or --env.drop-equal-scores false"
            )
        return self


class OpenaiSettings(_Section):
    """Where the policy is served."""

    base_url: list[Url] = Field(
        ["http://localhost:9001/v1"],
        min_length=1,
        description="URL of the inference server; several, separated by commas, share the "
        "requests, which in-place weight updates do not allow",
    )
    model_name: str = Field(min_length=1, description="Model served: hub id or directory")
    api_key: str = Field(
        "x", description="Accepted for Atropos command lines; never sent: see --vllm-api-key"
    )
    server_type: Literal["vllm"] = Field(
        "vllm", description="Kind of server: vllm, whose /generate returns log-probabilities"
    )
    request_deadline_s: float = Field(
        300.0,
        gt=0.0,
        description="How long the inference server may be unreachable, and how long the "
        "completions of one prompt may take (seconds)",
    )
    start_deadline_s: float = Field(
        1800.0,
        gt=0.0,
        description="How long to wait at the start until it serves: a large model loads for "
        "minutes (seconds)",
    )

    @field_validator("base_url", mode="before")
    @classmethod
    def _one_url_is_a_list_of_one(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("base_url")
    @classmethod
    def _each_server_once(cls, value: list[str]) -> list[str]:
        return list(dict.fromkeys(value))

    @field_validator("server_type", mode="before")
    @classmethod
    def _generates_with_logprobs(cls, value: Any) -> Any:
        if value != "vllm":
            raise ValueError(
                "only 'vllm' works: training needs the log-probability of every sampled token, "
                "which /generate of vllm-api-server returns and an OpenAI route does not"
            )
        return value


class EnvServerSettings(CommandSettings):
    """Sample groups for a task, grade them, send them to run-api."""

    model_config = SettingsConfigDict(cli_prog_name=PROG)

    task: CliPositionalArg[TaskName] = Field(description="Task to serve: arithmetic or gsm8k")
    action: CliPositionalArg[Literal["serve"]] = Field(
        description="serve: feed a trainer until its run is complete"
    )
    config: Path | None = Field(
        None,
        description="YAML file with the sections env and openai, the latter one server or a list "
        "of them; the command line wins over it",
    )
    run_api_token: SecretStr | None = Field(
        None, description="Token that run-api asks for (default: $RUN_API_TOKEN)"
    )
    vllm_api_key: SecretStr | None = Field(
        None, description="Key that the inference server asks for (default: $VLLM_API_KEY)"
    )
    env: EnvSettings = Field(default_factory=EnvSettings)
    openai: OpenaiSettings

    _usable_token = field_validator("run_api_token", "vllm_api_key")(usable_token)

    @model_validator(mode="before")
    @classmethod
    def _name_the_missing_option(cls, data: dict[str, Any]) -> dict[str, Any]:
        """An absent section reads as an empty one, so that the error names openai.model-name."""
        return {"openai": {}, **data}

    @property
    def tokenizer_name(self) -> str:
        return self.env.tokenizer_name or self.openai.model_name

    @property
    def wandb_name(self) -> str:
        return self.env.wandb_name or self.task


def load_env_settings(argv: Sequence[str]) -> EnvServerSettings:
    """Parse the command line and the file it names; a mistake ends the process with status 2."""
    path = config_argument(argv)
    if path is None:
        return load_settings(EnvServerSettings, argv)
    try:
        content = read_config_file(path)
        if unknown := content.sections.keys() - EnvServerSettings.model_fields.keys():
            raise ConfigFileUnusable(f"{path}: unknown: {', '.join(sorted(map(str, unknown)))}")
    except ConfigFileUnusable as error:
        sys.stderr.write(f"{PROG}: --config: {error}\n")
        raise SystemExit(EXIT_USAGE) from None
    if content.without_effect:
        sys.stderr.write(
            f"{PROG}: --config: {path}: without effect here: {', '.join(content.without_effect)}\n"
        )
    return load_settings(EnvServerSettings, argv, from_file=content.sections)
