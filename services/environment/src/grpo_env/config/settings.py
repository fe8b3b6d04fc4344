"""Options of the `env-server` command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
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

    Names of options of Atropos environments are accepted too, for example --env.group_size and
    --openai.base_url."""

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
            "Logging": ("log_level", "ready_file", "use_wandb"),
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
        "serve", description="The only action is serve: sample groups until the run has finished"
    )
    run_api_url: HttpUrl = Field("http://localhost:8000", description="URL of run-api")
    run_api_token: SecretStr | None = Field(None, description="Access token that run-api requires")
    group_size: int = Field(8, ge=1, description="Number of completions sampled for each prompt")
    seq_len: int = Field(
        2048,
        ge=2,
        description="A group is dropped if one of its sequences has this number of tokens or more. "
        "A smaller --seq-len of the trainer takes precedence",
    )
    max_completion_tokens: Annotated[int | None, Shown(default="by task: 16 or 512")] = Field(
        None,
        ge=1,
        description="Longest completion, in tokens. A completion that reaches this length is cut "
        "off and then graded",
    )
    temperature: float = Field(1.0, gt=0.0, allow_inf_nan=False, description="Sampling temperature")
    steps: Annotated[int, Shown(default="-1, which means the trainer's last step")] = Field(
        -1, ge=-1, description="Number of the training step after which this environment stops"
    )
    max_batches_offpolicy: int = Field(
        3,
        ge=1,
        description="Largest number of batches that are queued or being sampled. More batches keep "
        "the trainer busier, fewer batches keep the data fresher",
    )
    max_concurrent_groups: int = Field(
        32,
        ge=1,
        le=64,
        description="Largest number of groups that all environments of a run together sample at the"
        " same time",
    )
    drop_equal_scores: bool = Field(
        True,
        description="Drop groups whose scores are all equal, because the advantages of such a group"
        " are zero. Rewards of dropped groups still count in the reported mean reward",
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
        None, description="Name of the data set's configuration on the Hugging Face hub"
    )
    format_reward: float = Field(
        0.3,
        ge=0.0,
        lt=1.0,
        allow_inf_nan=False,
        description="Largest reward for the format of a gsm8k answer. If the result is correct, a "
        "reward of 1 is added",
    )
    wandb_name: Annotated[str | None, Shown(default="the task's name")] = Field(
        None, min_length=1, description="Name of this environment in metrics and in logs"
    )
    use_wandb: bool = Field(
        False,
        description="Log this environment's metrics to Weights & Biases, as a separate W&B run in "
        "the trainer's project and group",
    )
    weight: Weight = Field(
        1.0,
        description="Weight of this environment when the limit --max-concurrent-groups is divided "
        "among environments. -1: this environment takes no part in the division and may use the "
        "whole limit",
    )
    min_batch_allocation: float | None = Field(
        None,
        ge=0.0,
        le=1.0,
        allow_inf_nan=False,
        description="Minimum fraction (0 to 1) of every batch that must come from this "
        "environment. run-api delays a batch until the queue contains enough groups of this "
        "environment",
    )
    seed: int = Field(0, description="Random seed for the order of the prompts")
    run_api_deadline_s: float = Field(
        120.0,
        gt=0.0,
        description="Seconds to retry requests while run-api is unreachable",
    )
    trainer_deadline_s: float = Field(
        1800.0,
        gt=0.0,
        description="Seconds to wait until a trainer registers. If this environment can queue no "
        "more groups, also the seconds to wait until the trainer takes a batch",
    )
    next_run_deadline_s: float = Field(
        0.0,
        ge=0.0,
        description="Seconds to wait for a trainer to continue the run, if the run has already "
        "finished when this environment starts",
    )
    ready_file: Path | None = Field(
        None,
        description="File for a container's health check. The file exists while this environment "
        "runs",
    )
    inference_url: CommaSeparated[InferenceUrl] = Field(
        ("http://localhost:9001",),
        min_length=1,
        description="URL of the inference server. Several URLs, separated by commas, share the "
        "requests, and a server that is gone is skipped. Mode shared_vllm allows only one URL",
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
        "vllm",
        description="Type of the inference server. Only vllm returns the logprobs that training "
        "needs",
    )
    request_deadline_s: float = Field(
        300.0,
        gt=0.0,
        description="Seconds to wait for all completions of one prompt, retries included",
    )
    start_deadline_s: float = Field(
        1800.0, gt=0.0, description="Seconds to wait for an inference server to become healthy"
    )
    log_level: LogLevel = Field(
        "INFO", description="Least severe level of the messages that are logged"
    )

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
                "expected the server type vllm, because training needs the logprob of every "
                "sampled token, which only /generate of vllm-api-server returns"
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
        if self.use_wandb and find_spec("wandb") is None:
            yield Mistake(
                "use_wandb",
                "needs the package wandb: pip install wandb, or build the image with "
                "ENVIRONMENT_EXTRAS=wandb",
            )
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
