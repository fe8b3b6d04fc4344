"""Options of the `run-api` command."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, ClassVar

from pydantic import BaseModel, Field, SecretStr, ValidationInfo, field_validator

from grpo_core.redis.keys import run_id_or_default
from grpo_core.redis.url import LOCAL_REDIS, RedisUrl, local_redis
from grpo_core.security import usable_token
from grpo_core.settings import Command, CommandSettings, Mistake, Shown
from grpo_core.settings.machine import cannot_listen, failed
from grpo_core.tree.common import ListenOptions, Port

_FOUR_GIB = 4 * 1024**3
_DISK_SHARE = 6
"""Queue and leases may each take this part of Redis' disk, because Redis' append-only file grows to
twice its content before it is written anew, beside the old one."""


class LimitOptions(BaseModel):
    """Of memory, disk and time."""

    max_body_bytes: Annotated[int, Shown(default="33554432, which is 32 MiB")] = Field(
        32 * 1024 * 1024,
        ge=1024,
        description="Largest request body in bytes, before and after decompression",
    )
    body_deadline_s: float = Field(
        60.0,
        gt=0.0,
        le=3600.0,
        description="Seconds to wait for a complete request body. A slower request is answered "
        "with status 408",
    )
    max_queued_groups: int = Field(
        100_000,
        ge=1,
        description="Limit on the number of groups in the queue. At this limit, run-api delays "
        "submissions. From half of this limit on, environments slow down",
    )
    redis_disk_bytes: Annotated[
        int | None, Shown(default="unknown; for a Redis that run-api starts, the free disk space")
    ] = Field(
        None,
        ge=1024,
        description="Bytes of disk for Redis' append-only file. run-api warns when the file takes "
        "three quarters of them, because Redis ends when its disk is full",
    )
    max_queued_bytes: Annotated[
        int | None, Shown(default="a sixth of --redis-disk-bytes, at most 4 GiB")
    ] = Field(
        None,
        ge=1024,
        description="Limit on the compressed bytes of the queue and all partial groups together. "
        "At this limit, run-api delays submissions",
    )
    max_leased_bytes: Annotated[
        int | None, Shown(default="a sixth of --redis-disk-bytes, at most 4 GiB")
    ] = Field(
        None,
        ge=1024,
        description="Limit on the compressed bytes of unacknowledged batches. At this limit, the "
        "trainer gets its next batch only after an acknowledgement",
    )
    full_queue_wait_s: float = Field(
        20.0,
        ge=0.0,
        le=60.0,
        description="Seconds that a submission waits for room in a full queue. After this time the "
        "submission is answered with status 503",
    )
    environment_timeout_s: float = Field(
        60.0,
        gt=0.0,
        le=86400.0,
        description="An environment counts as disconnected if it sends no request to /status-env "
        "for this number of seconds",
    )
    stop_grace_s: int = Field(
        10,
        ge=1,
        le=3600,
        description="Seconds to wait for requests in flight after a stop signal. Slower requests "
        "are answered with status 503",
    )


class RunApiSettings(CommandSettings, LimitOptions, ListenOptions):
    """Trajectory server: queues scored groups from environments and hands out batches to the
    trainer. All state is in Redis, so run-api can be restarted at any time."""

    command: ClassVar[Command] = Command(
        prog="run-api",
        env_prefix="RUN_API_",
        groups={
            "Network": ("host", "port", "token", "allowed_hosts"),
            "Run": ("redis_url", "run_id", "redis_deadline_s"),
            "Limits": tuple(LimitOptions.model_fields),
            "Logging": ("log_level",),
        },
        examples=(
            "run-api --port 8002 --redis-url redis://127.0.0.1:6379",
            "REDIS_URL=redis://:password@db:6379 RUN_API_TOKEN=secret run-api --host 0.0.0.0",
        ),
    )

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on")
    port: Port = Field(8000, description="TCP port to listen on")
    redis_url: Annotated[RedisUrl, Shown(default=LOCAL_REDIS)] = Field(
        default_factory=local_redis,
        description="URL of the Redis that stores the run: redis://, rediss:// or unix://. If this "
        "option is not given and no Redis runs at its default, run-api starts one. Set a URL that "
        "contains a password in REDIS_URL, because other users can read command lines",
    )
    run_id: Annotated[str, Shown(default="port-<port>, for example port-8000")] = Field(
        "",
        validate_default=True,
        description="Name of the run. Runs with different names can use the same Redis",
    )
    redis_deadline_s: float = Field(
        10.0,
        gt=0.0,
        le=300.0,
        description="Seconds that a request waits for a Redis that does not answer. After this time"
        " the request is answered with status 503",
    )
    token: SecretStr | None = Field(
        None,
        description="Access token that clients must send as Authorization: Bearer <access token>. "
        "Without an access token, anyone who can reach the port can send requests",
    )

    _usable_token = field_validator("token")(usable_token)

    def start_mistakes(self) -> Iterator[Mistake]:
        return failed(partial(cannot_listen, self.host), port=self.port)

    @property
    def queued_bytes_limit(self) -> int:
        return self.max_queued_bytes or self._disk_share

    @property
    def leased_bytes_limit(self) -> int:
        return self.max_leased_bytes or self._disk_share

    @property
    def _disk_share(self) -> int:
        disk = self.redis_disk_bytes
        return _FOUR_GIB if disk is None else min(_FOUR_GIB, disk // _DISK_SHARE)

    @property
    def may_start_redis(self) -> bool:
        return "redis_url" not in self.model_fields_set

    @field_validator("run_id")
    @classmethod
    def _fits_a_redis_key(cls, value: str, info: ValidationInfo) -> str:
        return run_id_or_default(value, info.data.get("port", 0))
