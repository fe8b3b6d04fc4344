"""Options of the `run-api` command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field, SecretStr, field_validator

from grpo_core.redis.keys import DEFAULT_RUN_ID, is_run_id
from grpo_core.redis.url import RedisUrl
from grpo_core.security.bearer_token import usable_token
from grpo_core.settings import Command, CommandSettings, LogLevel, Mistake, Shown
from grpo_core.settings.machine import cannot_listen

_DEFAULT_REDIS = "redis://127.0.0.1:6379/0"
_FOUR_GIB = 4 * 1024**3


class RunApiSettings(CommandSettings):
    """Trajectory server: queues scored groups from environments and hands out batches to the
    trainer. All state is in Redis, so run-api can be restarted at any time."""

    command: ClassVar[Command] = Command(
        prog="run-api",
        env_prefix="RUN_API_",
        groups={
            "Network": ("host", "port", "token", "allowed_hosts"),
            "Run": ("redis_url", "run_id", "redis_deadline_s"),
            "Limits": (
                "max_body_bytes",
                "body_deadline_s",
                "max_queued_groups",
                "max_queued_bytes",
                "max_leased_bytes",
                "full_queue_wait_s",
                "environment_timeout_s",
                "stop_grace_s",
            ),
            "Logging": ("log_level",),
        },
        examples=(
            "run-api --port 8002 --redis-url redis://127.0.0.1:6379",
            "REDIS_URL=redis://:password@db:6379 RUN_API_TOKEN=secret run-api --host 0.0.0.0",
        ),
    )

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on")
    port: int = Field(8000, ge=1, le=65535, description="TCP port to listen on")
    redis_url: Annotated[RedisUrl, Shown(default=_DEFAULT_REDIS)] = Field(
        SecretStr(_DEFAULT_REDIS),
        description="Redis that holds the run's state: redis://, rediss:// or unix://. Use the "
        "environment variable for a URL with a password: other users can read command lines",
    )
    run_id: str = Field(
        DEFAULT_RUN_ID,
        description="Name of the run. Runs with different names can share one Redis",
    )
    max_body_bytes: Annotated[int, Shown(default="33554432, which is 32 MiB")] = Field(
        32 * 1024 * 1024,
        ge=1024,
        description="Largest request body in bytes, before and after decompression",
    )
    body_deadline_s: float = Field(
        60.0,
        gt=0.0,
        le=3600.0,
        description="Seconds in which a request body must arrive; a slower request is answered 408",
    )
    max_queued_groups: int = Field(
        100_000,
        ge=1,
        description="Size of the queue, in groups, above which submissions are delayed. "
        "Environments are slowed down when the queue has half this size",
    )
    max_queued_bytes: Annotated[int, Shown(default=f"{_FOUR_GIB}, which is 4 GiB")] = Field(
        _FOUR_GIB,
        ge=1024,
        description="Size of the queue, in compressed bytes, above which submissions are "
        "delayed. Partial groups count too",
    )
    max_leased_bytes: Annotated[int, Shown(default=f"{_FOUR_GIB}, which is 4 GiB")] = Field(
        _FOUR_GIB,
        ge=1024,
        description="Limit on the compressed bytes of batches that were handed out and not "
        "acknowledged. At the limit, the trainer must acknowledge a batch to get the next one",
    )
    full_queue_wait_s: float = Field(
        20.0,
        ge=0.0,
        le=60.0,
        description="Seconds that a submission waits for a full queue before it is answered 503",
    )
    redis_deadline_s: float = Field(
        10.0,
        gt=0.0,
        le=300.0,
        description="Seconds that a request waits for an absent Redis before it is answered 503",
    )
    environment_timeout_s: float = Field(
        60.0,
        gt=0.0,
        le=86400.0,
        description="Seconds without a request to /status-env after which an environment gets no "
        "share of the batch, until its next request",
    )
    stop_grace_s: int = Field(
        10,
        ge=1,
        le=3600,
        description="Seconds that requests in flight may take after a stop signal; slower "
        "requests are answered 503",
    )
    token: SecretStr | None = Field(
        None,
        description="Token that clients must send as Authorization: Bearer <token>. Without a "
        "token, everybody who reaches the port may send requests",
    )
    allowed_hosts: Annotated[str, Shown(metavar="NAMES")] = Field(
        "",
        description="Further host names under which clients may address this server, separated "
        "by commas. IP addresses, names without a dot, private names and names of "
        "this machine are always allowed",
    )
    log_level: LogLevel = Field("INFO", description="Least severe level that is logged")

    _usable_token = field_validator("token")(usable_token)

    def start_mistakes(self) -> Iterator[Mistake]:
        if problem := cannot_listen(self.host, self.port):
            yield Mistake("port", problem)

    @field_validator("run_id")
    @classmethod
    def _fits_a_redis_key(cls, value: str) -> str:
        if not is_run_id(value):
            raise ValueError("expected a name without spaces and braces")
        return value
