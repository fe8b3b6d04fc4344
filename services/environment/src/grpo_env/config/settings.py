"""Options of the `env-server` command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SecretStr, field_validator

from grpo_core.security.bearer_token import usable_token
from grpo_core.settings import (
    Command,
    CommandSettings,
    CommaSeparated,
    HttpUrl,
    InferenceUrl,
    LogLevel,
    Mistake,
    Shown,
    load_settings,
)
from grpo_core.settings.machine import missing_directory, not_writable
from grpo_core.wire.fields import Weight
from grpo_env.config.atropos import ALIASES, WITHOUT_EFFECT, one_policy

PROG = "env-server"
TaskName = Literal["arithmetic", "gsm8k"]


class EnvServerSettings(CommandSettings):
    """Environment: samples groups for a task, grades them and submits them to run-api.

    The options of an Atropos environment are accepted under their names there, for example
    --env.group_size and --openai.base_url."""

    command: ClassVar[Command] = Command(
        prog=PROG,
        positional=("task", "action"),
        groups={
            "Model": ("model", "tokenizer", "inference_url", "vllm_api_key", "server_type"),
            "Sampling": (
                "group_size",
                "temperature",
                "seq_len",
                "max_completion_tokens",
                "max_concurrent_groups",
                "max_batches_offpolicy",
                "drop_equal_scores",
            ),
            "Data": ("data", "data_config", "format_reward", "seed"),
            "Run": (
                "run_api_url",
                "run_api_token",
                "steps",
                "wandb_name",
                "weight",
                "min_batch_allocation",
            ),
            "Deadlines": (
                "start_deadline_s",
                "request_deadline_s",
                "run_api_deadline_s",
                "trainer_deadline_s",
                "next_run_deadline_s",
            ),
            "Logging": ("log_level", "ready_file"),
        },
        examples=(
            "env-server arithmetic serve --model ./model --group-size 8",
            "env-server gsm8k serve --model Qwen/Qwen2.5-0.5B-Instruct --data ./gsm8k --dry-run",
        ),
        aliases=ALIASES,
        without_effect=WITHOUT_EFFECT,
    )

    task: TaskName = Field(description="Task to sample: arithmetic or gsm8k")
    action: Literal["serve"] = Field(
        "serve", description="serve: sample groups until the run is complete"
    )
    run_api_url: HttpUrl = Field("http://localhost:8000", description="URL of run-api")
    run_api_token: SecretStr | None = Field(None, description="Token that run-api requires")
    group_size: int = Field(8, ge=1, description="Completions sampled for each prompt")
    seq_len: int = Field(
        2048,
        ge=2,
        description="Number of tokens in prompt and completion at which a sequence is too "
        "long, so that its group is dropped. The trainer's limit applies if it is "
        "smaller",
    )
    max_completion_tokens: Annotated[int | None, Shown(default="by task: 16 or 512")] = Field(
        None, ge=1, description="Tokens after which a completion ends and is graded as it is"
    )
    temperature: float = Field(1.0, gt=0.0, allow_inf_nan=False, description="Sampling temperature")
    steps: Annotated[int, Shown(default="-1, which means as many as the trainer")] = Field(
        -1, ge=-1, description="Stop after the training step with this number"
    )
    max_batches_offpolicy: int = Field(
        3,
        ge=1,
        description="Batches that may be queued or in progress. More batches keep the trainer "
        "busier, fewer batches keep the data fresher",
    )
    max_concurrent_groups: int = Field(
        8, ge=1, le=64, description="Groups that all environments together sample at once"
    )
    drop_equal_scores: bool = Field(
        True,
        description="Drop groups whose scores are all equal, because the advantages of such a "
        "group are zero. Its rewards still count in the reported mean",
    )
    tokenizer: Annotated[str | None, Shown(default="the model's")] = Field(
        None, description="Tokenizer: a directory or an id on the Hugging Face hub"
    )
    data: Annotated[str | None, Shown(default="openai/gsm8k from the hub")] = Field(
        None,
        min_length=1,
        description="Data set of gsm8k: a directory that contains train.jsonl, or an id on the "
        "Hugging Face hub",
    )
    data_config: Annotated[str | None, Shown(default="main")] = Field(
        None, description="Configuration of the data set from the Hugging Face hub"
    )
    format_reward: float = Field(
        0.3,
        ge=0.0,
        lt=1.0,
        allow_inf_nan=False,
        description="Largest reward that gsm8k gives for the format of an answer. A correct "
        "answer gets 1",
    )
    wandb_name: Annotated[str | None, Shown(default="the task's name")] = Field(
        None, min_length=1, description="Name of this environment in metrics and logs"
    )
    weight: Weight = Field(
        1.0,
        description="Weight of this environment when environments share "
        "--max-concurrent-groups among themselves. -1: this environment samples "
        "--max-concurrent-groups groups at once, in addition to the others",
    )
    min_batch_allocation: float | None = Field(
        None,
        ge=0.0,
        le=1.0,
        allow_inf_nan=False,
        description="Fraction of every batch that this environment must fill, from 0 to 1. A "
        "batch is complete only with this fraction",
    )
    seed: int = Field(0, description="Random seed for the order of the prompts")
    run_api_deadline_s: float = Field(
        120.0,
        gt=0.0,
        description="Seconds for which the environment retries a run-api that cannot be reached",
    )
    trainer_deadline_s: float = Field(
        1800.0,
        gt=0.0,
        description="Seconds to wait until a trainer registers, or takes a batch from a full queue",
    )
    next_run_deadline_s: float = Field(
        0.0,
        ge=0.0,
        description="Seconds to wait for a trainer that continues the run, if the run is "
        "complete before this environment joins",
    )
    ready_file: Path | None = Field(
        None,
        description="File that exists while this environment works, for a container's health check",
    )
    inference_url: CommaSeparated[InferenceUrl] = Field(
        ("http://localhost:9001",),
        min_length=1,
        description="URL of the inference server. Several servers, separated by commas, share "
        "the requests; mode shared_vllm allows only one server",
    )
    model: str = Field(
        min_length=1,
        description="Model that the inference server serves: a directory or an id on the "
        "Hugging Face hub",
    )
    vllm_api_key: SecretStr | None = Field(
        None, description="API key that the inference server requires"
    )
    server_type: Literal["vllm"] = Field(
        "vllm", description="Kind of inference server. Only vllm reports the logprobs of tokens"
    )
    request_deadline_s: float = Field(
        300.0,
        gt=0.0,
        description="Seconds in which a server must answer with the completions of one prompt, "
        "retries included",
    )
    start_deadline_s: float = Field(
        1800.0, gt=0.0, description="Seconds to wait at the start until the server is ready"
    )
    log_level: LogLevel = Field("INFO", description="Least severe level that is logged")

    _usable_token = field_validator("run_api_token", "vllm_api_key")(usable_token)

    @field_validator("inference_url")
    @classmethod
    def _each_server_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(value))

    @field_validator("server_type", mode="before")
    @classmethod
    def _generates_with_logprobs(cls, value: Any) -> Any:
        if value != "vllm":
            raise ValueError(
                "expected vllm: training needs the logprob of every sampled token, which only "
                "/generate of vllm-api-server returns"
            )
        return value

    @classmethod
    def prepare_file(cls, content: dict[str, Any]) -> dict[str, Any]:
        servers = content.get("openai")
        return content | ({"openai": one_policy(servers)} if isinstance(servers, list) else {})

    def mistakes(self) -> Iterator[Mistake]:
        if self.group_size == 1 and self.drop_equal_scores:
            yield Mistake(
                "group_size",
                "the scores of a group of 1 are always equal, so every group is dropped; pass 2 or "
                "more, or --no-drop-equal-scores",
            )
        if (self.max_completion_tokens or 0) >= self.seq_len:
            yield Mistake(
                "max_completion_tokens",
                f"a prompt and {self.max_completion_tokens} completion tokens exceed --seq-len "
                f"{self.seq_len}; lower --max-completion-tokens or raise --seq-len",
            )

    def start_mistakes(self) -> Iterator[Mistake]:
        for name in ("tokenizer" if self.tokenizer else "model", "data"):
            path = getattr(self, name)
            if path and (problem := missing_directory(path)):
                yield Mistake(name, problem)
        if self.ready_file and (problem := not_writable(self.ready_file.parent)):
            yield Mistake("ready_file", problem)

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer or self.model

    @property
    def display_name(self) -> str:
        return self.wandb_name or self.task


def load_env_settings(argv: Sequence[str]) -> EnvServerSettings:
    """Settings of a command line. A mistake ends the process with status 2 and one line."""
    return load_settings(EnvServerSettings, argv, at_start=True)
