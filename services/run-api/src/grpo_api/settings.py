"""Options of the `run-api` command."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import SettingsConfigDict

from grpo_core.redis.keys import DEFAULT_RUN_ID
from grpo_core.redis.url import RedisUrl
from grpo_core.security.bearer_token import usable_token
from grpo_core.settings import CommandSettings

_DEFAULT_REDIS = "redis://127.0.0.1:6379/0"


class RunApiSettings(CommandSettings):
    """Trajectory server: takes scored groups from environments, hands batches to the trainer.

    All state lives in Redis, so it can be restarted at any time.
    """

    model_config = SettingsConfigDict(cli_prog_name="run-api", env_prefix="RUN_API_")

    host: str = Field("127.0.0.1", description="address to listen on (RUN_API_HOST)")
    port: int = Field(8000, ge=1, le=65535, description="TCP port to listen on (RUN_API_PORT)")
    redis_url: RedisUrl = Field(
        SecretStr(_DEFAULT_REDIS),
        description="Redis that holds the run's state: redis://, rediss:// or unix://; with a "
        f"password better set as REDIS_URL: a command line is no secret. Unset: {_DEFAULT_REDIS}",
    )
    run_id: str = Field(
        DEFAULT_RUN_ID,
        min_length=1,
        pattern=r"^[^{}\s]+$",
        description="name of the run: runs with different names share one Redis (RUN_ID)",
    )
    max_body_bytes: int = Field(
        32 * 1024 * 1024,
        ge=1024,
        description="largest submission in bytes, as sent and after decompression",
    )
    body_deadline_s: float = Field(
        60.0,
        gt=0.0,
        le=3600.0,
        description="seconds within which a request's body has to arrive in full, else 408",
    )
    max_queued_groups: int = Field(
        100_000,
        ge=1,
        description="groups in the queue from which on submissions wait; environments are slowed "
        "from half of it on",
    )
    max_queued_bytes: int = Field(
        4 * 1024**3,
        ge=1024,
        description="the same in stored (compressed) bytes, buffered parts included",
    )
    max_leased_bytes: int = Field(
        4 * 1024**3,
        ge=1024,
        description="stored bytes of batches that were handed out and are not acknowledged, from "
        "which on a trainer has to acknowledge before it gets another",
    )
    full_queue_wait_s: float = Field(
        20.0,
        ge=0.0,
        le=60.0,
        description="seconds a submission waits for a full queue before it is answered 503",
    )
    redis_deadline_s: float = Field(
        10.0,
        gt=0.0,
        le=300.0,
        description="seconds a request waits for Redis to come back before it is answered 503",
    )
    environment_timeout_s: float = Field(
        60.0,
        gt=0.0,
        le=86400.0,
        description="seconds without a poll of /status-env after which an environment loses its "
        "weight and its minimum allocation, until it polls again",
    )
    stop_grace_s: int = Field(
        10,
        ge=1,
        le=3600,
        description="seconds that requests under way may take once the server is told to stop; "
        "those left are answered 503",
    )
    token: SecretStr | None = Field(
        None,
        description="what clients must send as Authorization: Bearer <token>; none: anybody who "
        "reaches the port may send. Better set as RUN_API_TOKEN: a command line is no secret",
    )
    allowed_hosts: str = Field(
        "",
        description="names under which clients ask for this server, separated by commas, beside "
        "addresses, names without a dot, private ones and this machine's own",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="least severe event to log"
    )

    _usable_token = field_validator("token")(usable_token)
