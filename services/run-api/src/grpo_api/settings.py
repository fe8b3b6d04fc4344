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
        description="URL of the Redis that stores the run: redis://, rediss:// or unix://. Set a "
        "URL with a password in the environment variable, because other users can read "
        "command lines",
    )
    run_id: str = Field(
        DEFAULT_RUN_ID,
        description="Name of the run. Runs with different names can use the same Redis",
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
        description="Limit, in seconds, on receiving a request body. A slower request is answered "
        "with status 408",
    )
    max_queued_groups: int = Field(
        100_000,
        ge=1,
        description="Size of the queue, in groups, at which submissions are delayed. Environments "
        "slow down from half this size on",
    )
    max_queued_bytes: Annotated[int, Shown(default=f"{_FOUR_GIB}, which is 4 GiB")] = Field(
        _FOUR_GIB,
        ge=1024,
        description="Size of the queue and of all partial groups, in compressed bytes, at which "
        "submissions are delayed",
    )
    max_leased_bytes: Annotated[int, Shown(default=f"{_FOUR_GIB}, which is 4 GiB")] = Field(
        _FOUR_GIB,
        ge=1024,
        description="Limit on the compressed bytes of unacknowledged batches. At this limit, the "
        "trainer gets its next batch only after an acknowledgement",
    )
    full_queue_wait_s: float = Field(
        20.0,
        ge=0.0,
        le=60.0,
        description="Seconds that a submission waits for room in a full queue. After this time it "
        "is answered with status 503",
    )
    redis_deadline_s: float = Field(
        10.0,
        gt=0.0,
        le=300.0,
        description="Seconds that a request waits for a Redis that does not answer. After this time"
        " the request is answered with status 503",
    )
    environment_timeout_s: float = Field(
        60.0,
        gt=0.0,
        le=86400.0,
        description="Seconds without a request to /status-env after which an environment counts as "
        "disconnected, until it sends a request again",
    )
    stop_grace_s: int = Field(
        10,
        ge=1,
        le=3600,
        description="Limit, in seconds, on requests in flight after a stop signal. Slower requests "
        "are answered with status 503",
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
    log_level: LogLevel = Field(
        "INFO", description="Least severe level of the messages that are logged"
    )

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
