"""Options of `grpo-demo`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from grpo_core.security.bearer_token import usable_token
from grpo_local.mode_options import ModeOptions

TaskName = Literal["arithmetic", "gsm8k"]


def half_the_cores() -> int:
    """Server and trainer compute at the same time: each gets half, so that neither waits."""
    return max(1, (os.cpu_count() or 1) // 2)


class DemoSettings(ModeOptions):
    """Train a model with GRPO on this machine and show the progress: Redis, run-api, vLLM server,
    environments and trainer as local processes, no GPU, container or model hub needed."""

    model_config = SettingsConfigDict(cli_prog_name="grpo-demo", env_prefix="GRPO_DEMO_")

    model: str | None = Field(
        None, description="checkpoint directory or hub id; a tiny model is made when not given"
    )
    run_dir: Path | None = Field(
        None,
        description="directory for logs, metrics and checkpoints, new or empty; "
        "runs/<UTC time>-<seed> when not given",
    )
    # NoDecode: a variable is not JSON either, but written as on the command line.
    task: Annotated[list[TaskName], NoDecode] = Field(
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

    @field_validator("task", mode="before")
    @classmethod
    def _split_at_commas(cls, value: Any) -> Any:
        words = [value] if isinstance(value, str) else value
        return [part for word in words for part in str(word).split(",")]

    @field_validator("task")
    @classmethod
    def _each_task_once(cls, value: list[TaskName]) -> list[TaskName]:
        return list(dict.fromkeys(value))

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


def _is_path(data: str) -> bool:
    """Ids of data sets are `name` or `owner/name`."""
    return data.startswith((".", "/", "~")) or data.count("/") > 1
