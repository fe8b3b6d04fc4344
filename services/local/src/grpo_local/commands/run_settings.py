"""Options of `grpo-run`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from grpo_core.redis.names import DEFAULT_RUN_ID
from grpo_core.redis.url import RedisUrl
from grpo_local.mode_options import ModeOptions

TRAINERS_RESTART_INTERVAL = 3
LOOPBACK = "127.0.0.1"
EVERY_ADDRESS = ("0.0.0.0", "::")


class RunSettings(ModeOptions):
    """Inference server and trainer together, on one host: starts the server with what the mode
    needs, waits until it answers, trains, and ends both. Its exit status is the trainer's.

    Everything behind a `--` goes to the trainer: grpo-run --model M --redis-url redis://db:6379
    --mode none -- --training-steps 100 --lr 1e-6
    """

    model_config = SettingsConfigDict(cli_prog_name="grpo-run", env_prefix="GRPO_RUN_")

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
