"""Options of `grpo-demo`, `grpo-run` and `grpo-compare`."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from grpo_core.redis.keys import DEFAULT_RUN_ID
from grpo_core.redis.url import RedisUrl
from grpo_core.security.bearer_token import usable_token
from grpo_core.settings import Command, CommandSettings
from grpo_local.modes import ModeName, ModeOptions, comma_separated

TaskName = Literal["arithmetic", "gsm8k"]

TRAINERS_RESTART_INTERVAL = 3
LOOPBACK = "127.0.0.1"
EVERY_ADDRESS = ("0.0.0.0", "::")

T = TypeVar("T")


def _each_once(values: list[T]) -> list[T]:
    return list(dict.fromkeys(values))


def half_the_cores() -> int:
    """Server and trainer compute at the same time: each gets half, so that neither waits."""
    return max(1, (os.cpu_count() or 1) // 2)


class DemoSettings(ModeOptions):
    """Train a model with GRPO on this machine and show the progress: Redis, run-api, vLLM server,
    environments and trainer as local processes, no GPU, container or model hub needed."""

    command: ClassVar[Command] = Command(prog="grpo-demo", env_prefix="GRPO_DEMO_")

    model: str | None = Field(
        None, description="checkpoint directory or hub id; a tiny model is made when not given"
    )
    run_dir: Path | None = Field(
        None,
        description="directory for logs, metrics and checkpoints, new or empty; "
        "runs/<UTC time>-<seed> when not given",
    )
    task: Annotated[
        list[TaskName], BeforeValidator(comma_separated), AfterValidator(_each_once)
    ] = Field(
        ["arithmetic"],
        min_length=1,
        description="what to train on: arithmetic (one-digit sums), gsm8k (word problems, needs "
        "--data), or both, separated by a comma, each in an environment of its own",
    )
    data: str | None = Field(
        None,
        min_length=1,
        validate_default=True,
        description="data of gsm8k: directory with train.jsonl, or id of a data set on the hub",
    )
    seed: int = Field(0, ge=0, description="seed of sampling, data order and training")
    steps: int | None = Field(
        None,
        ge=1,
        description="training steps (optimizer updates); unset: 250, gsm8k 60; "
        "60 where the engine restarts",
    )
    batch_size: int | None = Field(
        None, ge=1, description="sequences per forward pass; unset: 64, gsm8k 16"
    )
    gradient_accumulation_steps: int | None = Field(
        None, ge=1, description="forward passes per training step; unset: 2"
    )
    group_size: int = Field(8, ge=2, description="completions sampled per prompt")
    lr: float | None = Field(
        None, gt=0, description="peak learning rate of AdamW; unset: by task, with --model 1e-5"
    )
    warmup_steps: int = Field(5, ge=0, description="steps over which the learning rate rises")
    max_completion_tokens: int | None = Field(
        None,
        ge=1,
        description="longest completion, in tokens; unset: 8, gsm8k 32, gsm8k with --model 256",
    )
    seq_len: int | None = Field(
        None, ge=2, description="longest prompt plus completion, in tokens; unset: 128, gsm8k 1152"
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="longest sequence that the vLLM server takes, in tokens; unset: 512, gsm8k "
        "1536, never less than --seq-len",
    )
    kv_cache_mib: int | None = Field(
        None, ge=1, description="KV cache of the vLLM server, in MiB; unset: 64, gsm8k 256"
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None,
        description="data type of the weights in server and trainer; unset: float32, on a GPU "
        "bfloat16 in the LoRA modes, whose kernels take no float32",
    )
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="device of the trainer: cpu, cuda or cuda:N; auto: a GPU where there is one",
    )
    eager: bool = Field(
        True,
        description="the vLLM server neither compiles nor captures CUDA graphs: it starts sooner "
        "than a short run wins back; --no-eager serves faster",
    )
    gpu_memory_utilization: float = Field(
        0.4,
        gt=0,
        lt=1,
        description="on a GPU: share of its memory for the vLLM server; the rest is the trainer's",
    )
    max_batches_offpolicy: int = Field(
        1, ge=1, description="batches that may wait in the queue before sampling pauses"
    )
    step_deadline_s: float | None = Field(
        None,
        gt=0,
        description="seconds without a finished training step until the run fails; unset: 300, "
        "with --model 1800, and 180 more where the engine restarts",
    )
    model_deadline_s: float = Field(
        600.0, gt=0, description="seconds that making the tiny model may take"
    )
    server_deadline_s: float | None = Field(
        None,
        gt=0,
        description="seconds until the vLLM server must be healthy; unset: 600, with --model 1800",
    )
    start_deadline_s: float | None = Field(
        None,
        gt=0,
        description="seconds until run-api, trainer and environment must be ready; unset: 300, "
        "with --model 600",
    )
    compute_threads: int = Field(
        default_factory=half_the_cores,
        ge=1,
        description="threads each for the vLLM server and the trainer; half the cores by default",
    )

    redis_appendfsync: Literal["always", "everysec"] = Field(
        "always",
        description="when Redis syncs its file: always loses nothing acknowledged; everysec writes "
        "less, and may lose 1 to 2 s where Redis is killed or the power fails",
    )
    run_api_token: SecretStr | None = Field(
        None,
        description="token that run-api and the inference server ask for (default: "
        "$RUN_API_TOKEN); unset: none",
    )

    _usable_token = field_validator("run_api_token")(usable_token)

    @field_validator("data")
    @classmethod
    def _data_is_there_where_it_is_needed(cls, value: str | None, info: ValidationInfo) -> Any:
        if value is None and "gsm8k" in info.data.get("task", []):
            raise ValueError(
                "gsm8k needs data: pass --data (with make: DATA=) a directory that holds "
                "train.jsonl, one object with question and answer per line, or the id of a data "
                "set on the hub, such as openai/gsm8k"
            )
        if value is not None and _is_path(value) and not Path(value).expanduser().is_dir():
            raise ValueError("no such directory")
        return value

    @field_validator("max_model_len")
    @classmethod
    def _sequences_fit_the_server(cls, value: int | None, info: ValidationInfo) -> Any:
        seq_len = info.data.get("seq_len")
        if value is not None and seq_len is not None and value < seq_len:
            raise ValueError(f"less than --seq-len {seq_len}; the server would refuse prompts")
        return value


class RunSettings(ModeOptions):
    """Inference server and trainer together, on one host: starts the server with what the mode
    needs, waits until it answers, trains, and ends both. Its exit status is the trainer's.

    Everything behind a `--` goes to the trainer: grpo-run --model M --redis-url redis://db:6379
    --mode none -- --training-steps 100 --lr 1e-6
    """

    command: ClassVar[Command] = Command(prog="grpo-run", env_prefix="GRPO_RUN_")

    model: str = Field(description="hub id or directory of the model")
    redis_url: RedisUrl = Field(description="Redis of the run (default: $REDIS_URL)")
    run_id: str = Field(DEFAULT_RUN_ID, description="name of the run (default: $RUN_ID)")
    atropos_url: str = Field("http://localhost:8000", description="URL of run-api")
    host: str = Field("127.0.0.1", description="address that the inference server listens on")
    port: int = Field(9001, ge=1, le=65535, description="TCP port of the inference server")
    health_port: int | None = Field(
        None, ge=1, le=65535, description="TCP port of its health routes; unset: port + 1000"
    )
    save_path: Path = Field(
        Path("trained_model_checkpoints"), description="directory for checkpoints"
    )
    log_dir: Path = Field(Path("logs"), description="directory for vllm-server.log and trainer.log")
    server_flags: str = Field(
        "",
        description="more flags of the server, as in a shell: "
        "--server-flags='--max-model-len 4096 --gpu-memory-utilization 0.5'",
    )
    server_deadline_s: float = Field(
        1800.0, gt=0, description="seconds until the server must answer"
    )
    stop_grace_s: float = Field(
        120.0, gt=0, description="seconds that each process may take to end"
    )

    @property
    def server_words(self) -> list[str]:
        return shlex.split(self.server_flags)

    @property
    def server_url(self) -> str:
        """From this host."""
        host = LOOPBACK if self.host in EVERY_ADDRESS else self.host
        return f"http://{host}:{self.port}"

    @field_validator("server_flags")
    @classmethod
    def _shell_words(cls, value: str) -> str:
        shlex.split(value)  # ValueError where a quotation has no end
        return value

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        if self.port == self.health_port:
            raise ValueError(f"--port and --health-port are both {self.port}")
        return self


class CompareSettings(CommandSettings):
    """Train the same model on the same data with the same seed in each mode, and compare what it
    took: time, memory, restarts, dropped requests, reward.

    Everything behind a `--` goes to every run, which is one of grpo-demo.
    """

    command: ClassVar[Command] = Command(prog="grpo-compare", env_prefix="GRPO_COMPARE_")

    modes: Annotated[
        list[ModeName], BeforeValidator(comma_separated), AfterValidator(_each_once)
    ] = Field(
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
    gpu_ids: Annotated[list[str], BeforeValidator(comma_separated)] = Field(
        [],
        description="with --side-by-side: GPU of each mode, separated by commas; a run sees no "
        "other (CUDA_VISIBLE_DEVICES)",
    )

    @model_validator(mode="after")
    def _a_gpu_for_each_mode(self) -> Self:
        if self.gpu_ids and not self.side_by_side:
            raise ValueError("--gpu-ids is for --side-by-side")
        if self.gpu_ids and len(self.gpu_ids) != len(self.modes):
            raise ValueError(f"{len(self.gpu_ids)} --gpu-ids for {len(self.modes)} --modes")
        return self


def _is_path(data: str) -> bool:
    """Ids of data sets are `name` or `owner/name`."""
    return data.startswith((".", "/", "~")) or data.count("/") > 1
