"""Options of `vllm-api-server`. What is not listed here goes to vLLM's engine as it stands."""

from __future__ import annotations

import ipaddress
import os
import tempfile
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator
from pydantic_settings import CliUnknownArgs, SettingsConfigDict

from grpo_core.bridge_config import FILE_NAME
from grpo_core.redis_names import DEFAULT_RUN_ID
from grpo_core.settings import CommandSettings

UNIX_PATH_MAX_BYTES = 107
OWNED_ENGINE_FLAGS = frozenset({"--logprobs-mode", "--worker-extension-cls"})
"""Another value would break the importance ratio, or the sharing, without a word."""
REDIS_SCHEMES = ("redis", "rediss", "unix")


class ServerSettings(CommandSettings):
    """Inference server: vLLM with shareable weights and control over updates.

    Every option that is not listed here is passed to vLLM unchanged, for example --dtype,
    --max-model-len, --gpu-memory-utilization, --enforce-eager.
    """

    model_config = SettingsConfigDict(
        cli_prog_name="vllm-api-server", cli_ignore_unknown_args=True, env_prefix="GRPO_VLLM_"
    )

    model: str = Field(description="Hub id or directory of the model to serve")
    host: str = Field("127.0.0.1", description="Address to listen on")
    port: int = Field(9001, ge=1, le=65535, description="TCP port of the public routes")
    share_weights: bool = Field(
        False,
        description="Let a trainer on this host write the weights in place "
        "(VLLM_ENABLE_SHARED_WEIGHTS=1 means the same)",
    )
    weights_socket: Path | None = Field(
        None,
        description="Unix socket that hands the weights to the trainer "
        "(default: <temporary directory>/grpo-<user id>-<run id>-<port>/weights.sock)",
    )
    control_host: str = Field("127.0.0.1", description="Address of the control port")
    control_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="TCP port of the routes that change state (pause, resume); without it they "
        "are served on the public port, and only where that is bound to loopback",
    )
    max_pause_lease_s: float = Field(
        120.0, gt=0, description="Longest pause a trainer may ask for, in seconds"
    )
    bridge_config_path: Path | None = Field(
        None,
        description=f"Where to write {FILE_NAME} when weights are shared "
        "(VLLM_BRIDGE_CONFIG_PATH; default: in --logdir)",
    )
    logdir: Path = Field(Path("."), description=f"Directory for {FILE_NAME} (LOGDIR)")
    redis_url: str | None = Field(
        None,
        description="Redis that remembers which weights this run has served, so that a restarted "
        "server waits for them (REDIS_URL; default: none, and it serves its checkpoint)",
    )
    redis_deadline_s: float = Field(
        10.0, gt=0, description="How long Redis may take to answer at the start, in seconds"
    )
    await_weights: bool = Field(
        True,
        description="After a restart, hold requests until a trainer has written the served weights "
        "back; --no-await-weights serves the checkpoint under a new version instead",
    )
    write_back_hold_s: float = Field(
        20.0, gt=0, description="How long one request is held meanwhile, in seconds"
    )
    write_back_deadline_s: float = Field(
        300.0,
        gt=0,
        description="How long a trainer may take before requests are refused at once, in seconds",
    )
    run_id: str = Field(DEFAULT_RUN_ID, description="Name of the run (RUN_ID)")
    log_level: str = Field("INFO", description="Least severe level that is logged")
    engine_arguments: CliUnknownArgs

    @property
    def public_is_loopback(self) -> bool:
        return is_loopback(self.host)

    @property
    def socket_path(self) -> Path:
        folder = Path(tempfile.gettempdir()) / f"grpo-{os.getuid()}-{self.run_id}-{self.port}"
        return self.weights_socket or folder / "weights.sock"

    @property
    def bridge_config_file(self) -> Path:
        return self.bridge_config_path or self.logdir / FILE_NAME

    @property
    def bridge_config_required(self) -> bool:
        """Somebody said where it shall be, so somebody looks for it there."""
        return bool(self.model_fields_set & {"bridge_config_path", "logdir"})

    @field_validator("redis_url")
    @classmethod
    def _redis_url_names_a_redis(cls, value: str | None) -> str | None:
        if value is not None and urlsplit(value).scheme not in REDIS_SCHEMES:
            raise ValueError("expected redis://host:port/db, rediss://... or unix://...")
        return value

    @model_validator(mode="after")
    def _control_is_reachable_and_private(self) -> Self:
        if self.share_weights and self.control_port is None and not self.public_is_loopback:
            raise ValueError(
                f"--share-weights on {self.host} needs --control-port: routes that pause the "
                "server are not offered on an address that others reach"
            )
        return self

    @model_validator(mode="after")
    def _owns_what_sharing_and_ratios_hang_on(self) -> Self:
        names = {a.partition("=")[0].replace("_", "-") for a in self.engine_arguments}
        owned = OWNED_ENGINE_FLAGS | ({"--load-format"} if self.share_weights else set())
        taken = sorted(names & owned)
        if taken:
            raise ValueError(f"{', '.join(taken)}: set by vllm-api-server itself; leave out")
        return self

    @model_validator(mode="after")
    def _socket_path_fits(self) -> Self:
        if len(str(self.socket_path).encode()) > UNIX_PATH_MAX_BYTES:
            raise ValueError(
                f"--weights-socket {self.socket_path}: unix socket paths hold at most "
                f"{UNIX_PATH_MAX_BYTES} bytes; choose a shorter one"
            )
        return self


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
