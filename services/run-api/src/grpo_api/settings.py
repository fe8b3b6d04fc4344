"""Options of the `run-api` command."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from grpo_core.redis_names import DEFAULT_RUN_ID
from grpo_core.settings import CommandSettings

_REDIS_SCHEMES = ("redis", "rediss", "unix")


class RunApiSettings(CommandSettings):
    """Trajectory server: takes scored groups from environments, hands batches to the trainer.

    All state lives in Redis, so it can be restarted at any time.
    """

    model_config = SettingsConfigDict(cli_prog_name="run-api", env_prefix="RUN_API_")

    host: str = Field("127.0.0.1", description="address to listen on (RUN_API_HOST)")
    port: int = Field(8000, ge=1, le=65535, description="TCP port to listen on (RUN_API_PORT)")
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="Redis that holds the run's state: redis://, rediss:// or unix:// (REDIS_URL)",
    )
    run_id: str = Field(
        DEFAULT_RUN_ID,
        min_length=1,
        pattern=r"^[^{}\s]+$",
        description="name of the run: runs with different names share one Redis (RUN_ID)",
    )
    max_body_bytes: int = Field(
        64 * 1024 * 1024,
        ge=1024,
        description="largest request body in bytes, as sent and after decompression",
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
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="least severe event to log"
    )

    @field_validator("redis_url")
    @classmethod
    def _names_a_redis(cls, value: str) -> str:
        parts = urlsplit(value)
        _ = parts.port  # raises ValueError where it is no number
        if parts.scheme not in _REDIS_SCHEMES:
            raise ValueError(f"not a Redis URL; its scheme is one of {', '.join(_REDIS_SCHEMES)}")
        return value
