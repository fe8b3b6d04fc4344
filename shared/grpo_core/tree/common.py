"""Options that several services have, in the same words."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated

from pydantic import BaseModel, Field, SecretStr, field_validator

from grpo_core.security import usable_token
from grpo_core.settings import HttpUrl, LogLevel, Mistake, Shown
from grpo_core.settings.machine import cannot_listen, failed

LAST_PORT = 65535
Port = Annotated[int, Field(ge=1, le=LAST_PORT)]
OptionalPort = Annotated[int | None, Field(ge=1, le=LAST_PORT)]


class LogOptions(BaseModel):
    log_level: LogLevel = Field(
        "INFO", description="Least severe level of the messages that are logged"
    )


class ListenOptions(LogOptions):
    """Of a service that answers HTTP requests."""

    allowed_hosts: Annotated[str, Shown(metavar="NAMES")] = Field(
        "",
        description="Additional names that a request may contain in its Host header, separated by "
        "commas. Always allowed are IP addresses, this machine's names, names without a dot, and "
        "names that end in .internal, .local, .localhost or .svc",
    )


class ClientOptions(LogOptions):
    """Of a client of run-api and of the inference server."""

    run_api_url: HttpUrl = Field("http://localhost:8000", description="URL of run-api")
    run_api_token: SecretStr | None = Field(None, description="Access token that run-api requires")
    vllm_api_key: SecretStr | None = Field(
        None, description="API key that the inference server requires"
    )

    _usable_token = field_validator("run_api_token", "vllm_api_key")(usable_token)


class MetricsOptions(BaseModel):
    """Of a service that answers no other requests."""

    metrics_port: Annotated[OptionalPort, Shown(default="none")] = Field(
        None,
        description="TCP port of the route /metrics for Prometheus. The environments of "
        "grpo-run use the next higher ports",
    )
    metrics_host: str = Field(
        "127.0.0.1", min_length=1, description="Address on which --metrics-port listens"
    )

    def port_mistakes(self) -> Iterator[Mistake]:
        """Of a start on this machine."""
        check = partial(cannot_listen, self.metrics_host)
        return failed(check, metrics_port=self.metrics_port)
