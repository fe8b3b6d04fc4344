"""Settings of `env-server`: what to run, how to pace it, where the policy is served.

Names follow Atropos, so that its command lines and YAML files carry over.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    CliExplicitFlag,
    CliPositionalArg,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from grpo_core.settings import EXIT_USAGE, CommandSettings, load_settings

PROG = "env-server"
TaskName = Literal["arithmetic"]


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
    wandb_name: str = Field(
        "arithmetic", min_length=1, description="Name under which metrics are reported"
    )
    weight: float = Field(
        1.0,
        gt=0.0,
        allow_inf_nan=False,
        description="Share of the sampling slots, relative to the other environments (no unit)",
    )
    seed: int = Field(0, description="Seed of the order of the prompts")
    run_api_deadline_s: float = Field(
        120.0, gt=0.0, description="How long run-api may be unreachable (seconds)"
    )
    trainer_deadline_s: float = Field(
        1800.0, gt=0.0, description="How long to wait for a trainer to register (seconds)"
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

    base_url: Url = Field("http://localhost:9001/v1", description="URL of the inference server")
    model_name: str = Field(min_length=1, description="Model served: hub id or directory")
    api_key: str = Field("x", description="Accepted for Atropos command lines; never sent")
    server_type: Literal["vllm"] = Field(
        "vllm", description="Kind of server: vllm, whose /generate returns log-probabilities"
    )
    request_deadline_s: float = Field(
        300.0, gt=0.0, description="How long the inference server may be unreachable (seconds)"
    )

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

    task: CliPositionalArg[TaskName] = Field(description="Task to serve: arithmetic")
    action: CliPositionalArg[Literal["serve"]] = Field(
        description="serve: feed a trainer until its run is complete"
    )
    config: Path | None = Field(
        None,
        description="YAML file with the sections env and openai; the command line wins over it",
    )
    env: EnvSettings = Field(default_factory=EnvSettings)
    openai: OpenaiSettings

    @model_validator(mode="before")
    @classmethod
    def _name_the_missing_option(cls, data: dict[str, Any]) -> dict[str, Any]:
        """An absent section reads as an empty one, so that the error names openai.model-name."""
        return {"openai": {}, **data}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the signature is pydantic's
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Command line, then the file. The variables would be ENV, TASK and CONFIG: names that
        mean something else in many shells and containers."""
        return init_settings, YamlConfigSettingsSource(settings_cls)

    @property
    def tokenizer_name(self) -> str:
        return self.env.tokenizer_name or self.openai.model_name


def load_env_settings(argv: Sequence[str]) -> EnvServerSettings:
    """Parse the command line and the file it names; a mistake ends the process with status 2."""
    path = _config_argument(argv)
    if path is None:
        return load_settings(EnvServerSettings, argv)
    return load_settings(_reading_yaml(path), argv)


def _config_argument(argv: Sequence[str]) -> Path | None:
    """The file must be known before the command line is parsed: it is a source beside it."""
    for position, word in enumerate(argv):
        if word == "--config" and position + 1 < len(argv):
            return Path(argv[position + 1])
        if word.startswith("--config="):
            return Path(word.removeprefix("--config="))
    return None


def _reading_yaml(path: Path) -> type[EnvServerSettings]:
    _check_yaml(path)

    class EnvServerSettingsWithFile(EnvServerSettings):
        __doc__ = EnvServerSettings.__doc__
        model_config = SettingsConfigDict(yaml_file=path)

    return EnvServerSettingsWithFile


def _check_yaml(path: Path) -> None:
    """pydantic-settings skips a missing file in silence; here that is a usage error."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        _usage_error(f"cannot read {path}: {error}")
    if not isinstance(content, dict):
        _usage_error(f"{path}: expected a mapping with the sections env and openai")


def _usage_error(problem: str) -> NoReturn:
    sys.stderr.write(f"{PROG}: --config: {problem}\n")
    raise SystemExit(EXIT_USAGE)
