"""Options of `grpo-run`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator

from grpo_core.redis.keys import default_run_id
from grpo_core.redis.url import LOCAL_REDIS, RedisUrl, local_redis
from grpo_core.settings import (
    Command,
    CommaSeparated,
    HttpUrl,
    LogLevel,
    Mistake,
    Shown,
    flag_for,
)
from grpo_core.settings.machine import cannot_listen, not_writable, unusable_model
from grpo_core.weights.directory_checks import without_head
from grpo_runs.modes import ADAPTER_OPTIONS, HandOff, WeightOptions
from grpo_runs.service_options import SERVER, TRAINER
from grpo_runs.settings.services import HUB_OR_SMOLLM2, WithServiceOptions

LOOPBACK = "127.0.0.1"
EVERY_ADDRESS = ("0.0.0.0", "::")


class RunSettings(WithServiceOptions, WeightOptions):
    """Runs the inference server and the trainer of one run on this host: starts the server, then
    the trainer, and stops server and trainer at the end. run-api and environments are started
    separately. The exit status is the trainer's exit status.

    All other options are options of the trainer (grpo), for example --lr 1e-6. To set an option of
    the server, put its name in front: --server.max-num-seqs 64 (options of vllm-api-server and
    vLLM)."""

    command: ClassVar[Command] = Command(
        prog="grpo-run",
        env_prefix="GRPO_RUN_",
        groups={
            "Model": ("model", "dtype"),
            "Weights": ("mode", "vllm_restart_interval", "adapter_sync_interval"),
            "Adapter in lora_only and lora_restart": ADAPTER_OPTIONS,
            "Run": ("run_api_url", "redis_url", "run_id", "save_path"),
            "Inference server": (
                "host",
                "port",
                "health_port",
                "gpu_memory_utilization",
                "max_model_len",
                "server_flags",
            ),
            "Deadlines": ("server_deadline_s", "stop_grace_s"),
            "Logging": ("log_level", "log_dir"),
        },
        examples=(
            "grpo-run --model ./model --steps 100",
            "grpo-run --model ./model --redis-url redis://db:6379 --mode lora_only --dry-run",
        ),
        aliases={
            "model-name": "model",
            "weight-bridge-mode": "mode",
            "atropos-url": "run_api_url",
            "vllm-port": "port",
            "vllm-gpu-memory-utilization": "gpu_memory_utilization",
            "single-copy": flag_for("mode", "shared_vllm"),
            "debug-loading": flag_for("log_level", "DEBUG"),
        },
        passes_on="service_options",
        others=frozenset({"service-deadline-s"}),
    )
    services: ClassVar[tuple[str, ...]] = (TRAINER, SERVER)
    default_service: ClassVar[str | None] = TRAINER

    model: str = Field(min_length=1, description=f"Model: a directory, {HUB_OR_SMOLLM2}")
    vllm_restart_interval: int = Field(
        3,
        ge=1,
        description="Steps between two restarts of the engine, in mode lora_restart or mode none",
    )
    lora_target_modules: Annotated[
        CommaSeparated[str] | None, AfterValidator(without_head), Shown(default="q_proj,v_proj")
    ] = Field(
        None,
        min_length=1,
        description="Names of the modules that get an adapter, separated by commas",
    )
    redis_url: Annotated[RedisUrl, Shown(default=LOCAL_REDIS)] = Field(
        default_factory=local_redis,
        description="URL of the Redis that run-api uses. If this option is not given and no Redis "
        "runs at its default, grpo-run starts one",
    )
    run_id: Annotated[str | None, Shown(default="port-<port>, for example port-9001")] = Field(
        None, description="Name of the run, which is also the name of the run's data in Redis"
    )
    run_api_url: HttpUrl = Field("http://localhost:8000", description="URL of run-api")
    host: str = Field("127.0.0.1", min_length=1, description="Address that the server listens on")
    port: int = Field(9001, ge=1, le=65535, description="TCP port of the server")
    health_port: Annotated[int | None, Shown(default="1000 above --port")] = Field(
        None, ge=1, le=65535, description="TCP port of the server's health routes"
    )
    save_path: Path = Field(
        Path("trained_model_checkpoints"),
        description="Directory for checkpoints and exported models",
    )
    log_dir: Path = Field(Path("logs"), description="Directory for vllm-server.log and trainer.log")
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = Field(
        "auto",
        description="Data type of the weights in the server and in the trainer. auto: the model's; "
        "float32 on a CPU without instructions for bfloat16",
    )
    gpu_memory_utilization: float = Field(
        0.45, gt=0, le=1, description="Fraction of the GPU's memory that the server may use"
    )
    max_model_len: Annotated[int | None, Shown(default="the model's limit, at most 4096")] = Field(
        None, ge=1, description="Longest sequence, in tokens, that the server accepts"
    )
    server_flags: str = Field(
        "",
        description="More options for the inference server, in one string, for example "
        "--server-flags='--max-num-seqs 64'",
    )
    server_deadline_s: float = Field(
        1800.0, gt=0, description="Seconds to wait for the inference server to start"
    )
    stop_grace_s: float = Field(
        120.0,
        gt=0,
        description="Seconds to wait for each process to stop before the process is killed",
    )
    log_level: LogLevel = Field(
        "INFO", description="Least severe level of the messages that are logged"
    )

    @property
    def may_start_redis(self) -> bool:
        return "redis_url" not in self.model_fields_set

    @property
    def server_words(self) -> list[str]:
        return shlex.split(self.server_flags)

    @property
    def server_url(self) -> str:
        """For clients on this host."""
        host = LOOPBACK if self.host in EVERY_ADDRESS else self.host
        return f"http://{host}:{self.port}"

    @field_validator("server_flags")
    @classmethod
    def _shell_words(cls, value: str) -> str:
        try:
            shlex.split(value)
        except ValueError as error:
            raise ValueError(
                f"cannot split the value into words as a shell does ({error}); check its quotes"
            ) from None
        return value

    def mistakes(self) -> Iterator[Mistake]:
        if self.port == self.health_port:
            yield Mistake(
                None, f"--port and --health-port are both {self.port}; change one of them"
            )
        yield from super().mistakes()

    def _machine_mistakes(self) -> Iterator[Mistake]:
        if problem := unusable_model(self.model):
            yield Mistake("model", problem)
        for name, path in (("save_path", self.save_path), ("log_dir", self.log_dir)):
            if problem := not_writable(path):
                yield Mistake(name, problem)
        if problem := cannot_listen(self.host, self.port):
            yield Mistake("port", problem)

    def hand_off(self, weights_socket: Path, bridge_config: Path) -> HandOff:
        return HandOff(
            options=self,
            restart_every_steps=self.vllm_restart_interval,
            target_modules=self.lora_target_modules or (),
            redis_url=self.redis_url.get_secret_value(),
            run_id=self.run_id or default_run_id(self.port),
            save_path=self.save_path,
            weights_socket=weights_socket,
            bridge_config=bridge_config,
        )

    def _words_for(self, service: str) -> tuple[list[str], Mapping[str, str]]:
        hand_off = self.hand_off(Path("weights.sock"), Path("bridge.json"))
        flags = hand_off.trainer_flags() if service == TRAINER else hand_off.server_flags()
        return ["--model", self.model, *flags], hand_off.environment()
