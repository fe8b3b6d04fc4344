"""Options of `vllm-api-server`. What is not listed here goes to vLLM's engine as it stands."""

from __future__ import annotations

import ipaddress
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import CliUnknownArgs, SettingsConfigDict

from grpo_core.redis.keys import DEFAULT_RUN_ID
from grpo_core.redis.url import OptionalRedisUrl
from grpo_core.security.bearer_token import usable_token
from grpo_core.settings import CommandSettings, load_settings
from grpo_core.weights.bridge_config import FILE_NAME
from grpo_core.weights.directory_checks import LORA_RANKS
from grpo_vllm.engine.plugin import SHARE_WEIGHTS_VARIABLE

UNIX_PATH_MAX_BYTES = 107
OWNED_ENGINE_FLAGS = frozenset({"--logprobs-mode", "--worker-extension-cls"})
"""Another value would break the importance ratio, or the sharing, without a word."""
HEALTH_PORT_ABOVE = 1000
LAST_PORT = 65535


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
    redis_url: OptionalRedisUrl = Field(
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
    enable_lora: bool = Field(
        False,
        description="Take LoRA adapters: the served name answers from the newest, "
        "<name>@base from the model itself",
    )
    max_lora_rank: int = Field(
        16, description=f"Largest rank of an adapter, one of {', '.join(map(str, LORA_RANKS))}"
    )
    max_loras: int = Field(
        4, ge=2, description="Adapters that one batch may mix: those before the newest included"
    )
    weights_dir: Path | None = Field(
        None,
        description="The only directory that adapters and checkpoints are taken from, the "
        "trainer's <save path>/served_weights (default: none are taken)",
    )
    health_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        validate_default=True,
        description="TCP port of /healthz, /readyz and /status on --control-host, which answer "
        "while the engine restarts too (default: 1000 above --port)",
    )
    api_key: SecretStr | None = Field(
        None,
        description="Key that requests must carry as Authorization: Bearer <key>, except those of "
        "probes (default: $VLLM_API_KEY, better set there: a command line is no secret; none: "
        "anybody who reaches a port may ask)",
    )
    allowed_hosts: str = Field(
        "",
        description="Names under which clients ask for this server, separated by commas, beside "
        "addresses, names without a dot, private ones and this machine's own",
    )
    drain_s: float = Field(
        60.0,
        ge=0,
        description="How long requests under way may take before a restart, in seconds; those "
        "that take longer are answered 503",
    )
    stop_grace_s: float = Field(
        8.0, gt=0, description="How long the engine process may take to end, in seconds"
    )
    engine_deadline_s: float = Field(
        1800.0, gt=0, description="How long an engine may take to start, in seconds"
    )
    restart_limit: int = Field(
        5,
        ge=1,
        description="Engines that may fail in a row, without newer weights served in between, "
        "before the server gives up: it then answers 503 until it is told what to serve",
    )
    run_id: str = Field(DEFAULT_RUN_ID, description="Name of the run (RUN_ID)")
    log_level: str = Field("INFO", description="Least severe level that is logged")
    engine_arguments: CliUnknownArgs

    @property
    def public_is_loopback(self) -> bool:
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

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

    _usable_key = field_validator("api_key")(usable_token)

    @field_validator("health_port")
    @classmethod
    def _health_port_is_near_the_public_one(
        cls, value: int | None, info: ValidationInfo
    ) -> int | None:
        port: int | None = info.data.get("port")
        if value is not None or port is None:
            return value
        above = port + HEALTH_PORT_ABOVE
        return above if above <= LAST_PORT else port - HEALTH_PORT_ABOVE

    @field_validator("max_lora_rank")
    @classmethod
    def _rank_is_one_of_vllms(cls, value: int) -> int:
        if value not in LORA_RANKS:
            raise ValueError(f"one of {', '.join(map(str, LORA_RANKS))}")
        return value

    @model_validator(mode="after")
    def _adapters_and_writing_in_place_are_two_modes(self) -> Self:
        if self.share_weights and self.enable_lora:
            raise ValueError(
                "--enable-lora and --share-weights: a trainer either writes the weights in place "
                "or sends adapters; choose one"
            )
        return self

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


def load_server_settings(argv: Sequence[str]) -> ServerSettings:
    """Ends the process with status 2 and a line per mistake."""
    return load_settings(
        ServerSettings,
        argv,
        variables={
            "share_weights": SHARE_WEIGHTS_VARIABLE,
            "bridge_config_path": "VLLM_BRIDGE_CONFIG_PATH",
            "logdir": "LOGDIR",
            "api_key": "VLLM_API_KEY",
        },
    )
