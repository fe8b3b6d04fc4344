"""Options that several services have, in the same words."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, SecretStr, field_validator

from grpo_core.security import usable_token
from grpo_core.settings import HttpUrl, LogLevel, Shown


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
