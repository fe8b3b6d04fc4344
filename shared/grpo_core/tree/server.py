"""Options of `vllm-api-server`. Every other option is passed to vLLM's engine."""

from __future__ import annotations

import itertools
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, SecretStr, ValidationInfo, field_validator

from grpo_core.listening import in_url, is_every_address
from grpo_core.redis.keys import run_id_or_default
from grpo_core.redis.url import LOCAL_REDIS, WITHOUT_REDIS, OptionalRedisUrl, local_redis
from grpo_core.security import is_loopback, listed, usable_token
from grpo_core.settings import Command, CommandSettings, Given, Mistake, Shown
from grpo_core.settings.machine import cannot_listen, failed, missing_model, state_directory
from grpo_core.tree.common import LAST_PORT, ListenOptions, OptionalPort, Port
from grpo_core.weights.bridge_config import FILE_NAME
from grpo_core.weights.directory_checks import LORA_RANKS, SERVED_WEIGHTS

SHARE_WEIGHTS_VARIABLE = "VLLM_ENABLE_SHARED_WEIGHTS"
NODES_VARIABLE = "NUM_INFERENCE_NODES"
"""The archived server shares its weights if this variable is set, also to 0."""
UNIX_PATH_MAX_BYTES = 107
OWNED_ENGINE_FLAGS = frozenset({"--logprobs-mode", "--worker-extension-cls"})
"""Another value would silently break the importance ratio or the shared memory."""
PARALLEL_FLAGS = {
    **dict.fromkeys(("--tensor-parallel-size", "-tp"), "tensor"),
    **dict.fromkeys(("--pipeline-parallel-size", "-pp"), "pipeline"),
}
HEALTH_PORT_ABOVE = 1000
SHARED_MEMORY = Path("/dev/shm")


class SharedWeightsOptions(BaseModel):
    """Of the mode shared_vllm."""

    share_weights: bool = Field(
        False,
        description="Share the weights in memory with a trainer on this host, so that the trainer "
        "can update them. The variable NUM_INFERENCE_NODES=0 also turns this option on, except "
        "with --enable-lora",
    )
    weights_socket: Annotated[
        Path | None, Shown(default="grpo-<user id>-<run id>-<port>/weights.sock below $TMPDIR")
    ] = Field(None, description="Unix socket through which the trainer gets the shared weights")
    bridge_config_path: Annotated[Path | None, Shown(default="a file in --logdir")] = Field(
        None,
        description=f"Path of the file (by default {FILE_NAME}) that describes the shared "
        "weights to the trainer",
    )
    logdir: Annotated[Path, Shown(default="the current directory")] = Field(
        Path("."), description=f"Directory in which the server writes {FILE_NAME}"
    )
    max_pause_lease_s: float = Field(
        120.0, gt=0, description="Longest pause, in seconds, that a trainer may request"
    )
    await_weights: bool = Field(
        True,
        description="After a restart, or if a trainer ended while it wrote the weights, hold "
        "requests until a trainer has written all weights. With --no-await-weights, the server "
        "serves --model under a new policy version instead",
    )
    write_back_hold_s: float = Field(
        20.0,
        gt=0,
        description="Seconds that a request waits for a trainer to write the weights back, see "
        "--await-weights. After this time the request is answered with status 503",
    )
    write_back_deadline_s: float = Field(
        300.0,
        gt=0,
        description="Seconds that a trainer has to write the weights back, see --await-weights. "
        "After this time the server answers every request at once with status 503",
    )


class ServerSettings(CommandSettings, SharedWeightsOptions, ListenOptions):
    """Inference server: vLLM whose weights a trainer updates in memory, by adapters or by restarts.

    Options that are not listed here are passed to vLLM, for example --dtype, --max-model-len,
    --gpu-memory-utilization and --enforce-eager."""

    command: ClassVar[Command] = Command(
        prog="vllm-api-server",
        env_prefix="GRPO_VLLM_",
        variables={
            "share_weights": SHARE_WEIGHTS_VARIABLE,
            "bridge_config_path": "VLLM_BRIDGE_CONFIG_PATH",
            "logdir": "LOGDIR",
            "api_key": "VLLM_API_KEY",
        },
        groups={
            "Model": ("model",),
            "Network": (
                "host",
                "port",
                "control_host",
                "control_port",
                "health_port",
                "api_key",
                "allowed_hosts",
            ),
            "Weights": (
                "weights_dir",
                "redis_url",
                "run_id",
                "redis_deadline_s",
                "server_name",
                "advertise_url",
                "staging_dir",
                "max_staleness",
                "enable_lora",
                "max_lora_rank",
                "max_loras",
            ),
            "Weights in shared_vllm": tuple(SharedWeightsOptions.model_fields),
            "Engine": ("engine_deadline_s", "restart_limit", "drain_s", "stop_grace_s"),
            "Logging": ("log_level",),
        },
        examples=(
            "vllm-api-server --model Qwen/Qwen2.5-0.5B-Instruct --share-weights",
            "vllm-api-server --model ./model --enable-lora --weights-dir ./run/served_weights",
        ),
        passes_on="engine_arguments",
    )

    model: str = Field(
        min_length=1, description="Model to serve: a directory or an id on the Hugging Face hub"
    )
    host: str = Field(
        "127.0.0.1", min_length=1, description="Address on which the public port listens"
    )
    port: Port = Field(9001, description="TCP port of the public routes, such as /generate")
    control_host: str = Field(
        "127.0.0.1", description="Address on which the control and health ports listen"
    )
    control_port: Annotated[
        OptionalPort, Shown(default="--port, if --host is a loopback address")
    ] = Field(None, description="TCP port of the routes that pause and resume sampling")
    redis_url: Annotated[OptionalRedisUrl, Shown(default=LOCAL_REDIS)] = Field(
        default_factory=local_redis,
        description="URL of the Redis in which the server records the served weights, and through "
        "which a trainer sends commands. A restarted server serves the recorded weights or, with "
        f"--share-weights, waits for a trainer to write them back. {WITHOUT_REDIS}: the server "
        "never uses Redis. If this option names a URL, the server starts only if Redis answers at "
        "this URL. With the default URL, the server also starts without Redis, and uses Redis as "
        "soon as it answers",
    )
    redis_deadline_s: float = Field(
        10.0,
        gt=0,
        description="Seconds to wait at the start until the Redis that --redis-url names answers",
    )
    enable_lora: bool = Field(
        False,
        description="Accept LoRA adapters. A request for the model <name> then uses the newest "
        "adapter, and a request for <name>@base uses the base model",
    )
    max_lora_rank: int = Field(
        16, description=f"Largest rank of an adapter, one of {', '.join(map(str, LORA_RANKS))}"
    )
    max_loras: int = Field(
        4,
        ge=2,
        description="Largest number of different adapters that the engine uses in one forward pass",
    )
    weights_dir: Annotated[
        Path | None, Shown(default="<run id>/served_weights below ~/.local/state/grpo")
    ] = Field(
        None,
        description="Only directory from which the server loads adapters and models. The trainer "
        "writes them into this directory, so trainer and server must see the directory under the "
        "same path",
    )
    health_port: Annotated[OptionalPort, Shown(default="--port plus 1000")] = Field(
        None,
        validate_default=True,
        description="TCP port of the routes /healthz, /readyz and /status, which also answer while "
        "the engine restarts",
    )
    api_key: SecretStr | None = Field(
        None,
        description="API key that clients must send as Authorization: Bearer <key>. Without an API "
        "key, anyone who can reach the server's ports can send requests",
    )
    drain_s: float = Field(
        60.0,
        ge=0,
        description="Seconds to wait for requests in flight before a restart of the engine. "
        "Slower requests are answered with status 503",
    )
    stop_grace_s: float = Field(
        8.0,
        gt=0,
        description="Seconds to wait for the engine to stop before it is killed",
    )
    engine_deadline_s: float = Field(
        1800.0, gt=0, description="Seconds to wait for the engine to start before it is stopped"
    )
    restart_limit: int = Field(
        5,
        ge=1,
        description="Number of engine failures in a row after which the server no longer restarts "
        "the engine and answers requests with status 503",
    )
    run_id: Annotated[str, Shown(default="port-<port>, for example port-9001")] = Field(
        "",
        validate_default=True,
        description="Name of the run, which is also the name of the run's data in Redis",
    )
    server_name: Annotated[str, Shown(default="<host name>-<port>")] = Field(
        "",
        validate_default=True,
        pattern=r"^[\w.-]*$",
        max_length=200,
        description="Name of this server among the servers of the run",
    )
    advertise_url: Annotated[str, Shown(default="http://<host>:<port>")] = Field(
        "",
        validate_default=True,
        pattern=r"^(https?://\S+)?$",
        description="URL of the public port, as trainer, environments and other servers reach it. "
        "For a server that listens on all addresses, the default has the host's name",
    )
    staging_dir: Annotated[Path | None, Shown(default="/dev/shm")] = Field(
        None,
        description="Directory for weights that the server fetches from the trainer or from other "
        "servers. The server keeps them in a subdirectory, grpo-<user id>-<run id>-<server name>, "
        "which it empties when it starts and ends. It needs room for three versions. Weights below "
        "--weights-dir are used in place",
    )
    max_staleness: int | None = Field(
        None,
        ge=0,
        description="Steps by which the served weights may be older than the newest announced "
        "weights. An older server answers requests with status 503 until it has caught up",
    )
    engine_arguments: tuple[str, ...] = ()

    @property
    def redis(self) -> str | None:
        """URL of Redis; None without Redis."""
        url = self.redis_url.get_secret_value()
        return None if url == WITHOUT_REDIS else url

    @property
    def redis_required(self) -> bool:
        """Whether a start without Redis fails: it was named, so it should be there."""
        return "redis_url" in self.model_fields_set

    @property
    def loads_from(self) -> Path:
        """The only directory from which weights are loaded."""
        return self.weights_dir or state_directory() / self.run_id / SERVED_WEIGHTS

    @property
    def follows(self) -> bool:
        """Whether the server follows the versions that a trainer announces."""
        return self.redis is not None and not self.share_weights

    @property
    def loads_in_place(self) -> bool:
        """Whether the running engine can load the weights of a whole model."""
        return not self.share_weights and not self.enable_lora

    @property
    def staging(self) -> Path:
        """The server's own directory, which it may delete."""
        name = f"grpo-{os.getuid()}-{self.run_id}-{self.server_name}"
        return (self.staging_dir or SHARED_MEMORY) / name

    @property
    def own_hosts(self) -> list[str]:
        """Names by which others reach this server."""
        announced = (urlsplit(self.advertise_url).hostname, urlsplit(self.weights_url).hostname)
        return [*listed(self.allowed_hosts), *filter(None, announced)]

    @property
    def weights_url(self) -> str:
        """URL below which other servers fetch weights from this one: on the health port. "" if they
        cannot reach that port."""
        host = urlsplit(self.advertise_url).hostname or ""
        if is_loopback(self.control_host) and not is_loopback(host):
            return ""
        reached = host if is_every_address(self.control_host) else self.control_host
        return f"http://{in_url(reached)}:{self.health_port}/weights"

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
        """Its place was given, so a trainer reads it there."""
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

    @field_validator("run_id")
    @classmethod
    def _fits_a_redis_key(cls, value: str, info: ValidationInfo) -> str:
        if not value and "port" not in info.data:  # of a run, which knows its port later
            return value
        return run_id_or_default(value, info.data.get("port", 0))

    @field_validator("server_name")
    @classmethod
    def _named_after_its_host(cls, value: str, info: ValidationInfo) -> str:
        return value or f"{socket.gethostname()}-{info.data.get('port', 0)}"

    @field_validator("advertise_url")
    @classmethod
    def _reached_where_it_listens(cls, value: str, info: ValidationInfo) -> str:
        if "@" in urlsplit(value).netloc:
            raise ValueError("expected a URL without user and password; others do not send them")
        host, port = info.data.get("host", ""), info.data.get("port", 0)
        reached = socket.gethostname() if is_every_address(host) else host
        return value.rstrip("/") or f"http://{in_url(reached)}:{port}"

    @field_validator("max_lora_rank")
    @classmethod
    def _rank_is_one_of_vllms(cls, value: int) -> int:
        if value not in LORA_RANKS:
            raise ValueError(
                f"expected a rank that vLLM supports: {', '.join(map(str, LORA_RANKS))}"
            )
        return value

    @classmethod
    def drop_unused(cls, given: dict[str, Given], environment: Mapping[str, str]) -> Iterator[str]:
        """Variables that make the archived server share its weights, unless it serves adapters or
        is one of several servers."""
        nodes = environment.get(NODES_VARIABLE)
        if nodes and not nodes.isdecimal():
            raise ValueError(
                f"{NODES_VARIABLE}: expected the number of inference servers, or 0 for one server "
                f"that shares its weights; got {nodes!r}"
            )
        if nodes and int(nodes) == 0 and "share_weights" not in given:
            given["share_weights"] = Given("true", NODES_VARIABLE)
        shares = given.get("share_weights")
        if nodes and int(nodes) and shares and shares.name == SHARE_WEIGHTS_VARIABLE:
            del given["share_weights"]
            if _is_on(shares):
                yield f"ignored with {NODES_VARIABLE}={nodes}: {SHARE_WEIGHTS_VARIABLE}"
        shares, lora = given.get("share_weights"), given.get("enable_lora")
        if shares and shares.name in (NODES_VARIABLE, SHARE_WEIGHTS_VARIABLE) and _is_on(lora):
            del given["share_weights"]
            if _is_on(shares):
                yield f"ignored with --enable-lora: {shares.name}"

    def mistakes(self) -> Iterator[Mistake]:
        if self.share_weights and self.enable_lora:
            yield Mistake(None, "--enable-lora and --share-weights exclude each other")
        if self.share_weights and self.control_port is None and not self.public_is_loopback:
            yield Mistake(
                None,
                f"--share-weights on {self.host} needs --control-port: the routes that pause the "
                "server are not offered on an address that other hosts reach",
            )
        if self.share_weights and (workers := worker_count(self.engine_arguments)) > 1:
            yield Mistake(
                None,
                f"{workers} workers of vLLM share no weights: each has a part of every weight, and "
                "in mode shared_vllm a trainer writes whole weights into one; omit "
                "--tensor-parallel-size and --pipeline-parallel-size, or choose mode none, "
                "lora_only or lora_restart",
            )
        names = {a.partition("=")[0].replace("_", "-") for a in self.engine_arguments}
        owned = OWNED_ENGINE_FLAGS | ({"--load-format"} if self.share_weights else set())
        owned |= set() if self.share_weights else {"--weight-transfer-config"}
        if taken := sorted(names & owned):
            yield Mistake(
                None,
                f"{', '.join(taken)}: vllm-api-server sets this option itself; omit this option",
            )
        if len(str(self.socket_path).encode()) > UNIX_PATH_MAX_BYTES:
            problem = f"{self.socket_path} is longer than {UNIX_PATH_MAX_BYTES} bytes"
            yield Mistake("weights_socket", f"{problem}; choose a shorter path")

    def start_mistakes(self) -> Iterator[Mistake]:
        yield from failed(missing_model, model=self.model)
        yield from failed(partial(cannot_listen, self.host), port=self.port)
        control = {"control_port": self.control_port, "health_port": self.health_port}
        yield from failed(partial(cannot_listen, self.control_host), **control)

    def resolved(self) -> dict[str, Any]:
        held = super().resolved()
        if not self.bridge_config_required:  # these two count as given by being there
            del held["bridge_config_path"], held["logdir"]
        return held


def worker_count(engine_arguments: Sequence[str]) -> int:
    """The number of workers that vLLM starts for one model. vLLM itself refuses invalid numbers."""
    sizes = {"tensor": 1, "pipeline": 1}
    words = [part for word in engine_arguments for part in word.split("=", 1)]
    for flag, value in itertools.pairwise(words):
        kind = PARALLEL_FLAGS.get(flag.replace("_", "-"))
        if kind is not None and value.isdecimal():
            sizes[kind] = max(1, int(value))
    return sizes["tensor"] * sizes["pipeline"]


def _is_on(given: Given | None) -> bool:
    return given is not None and str(given.value).lower() in ("true", "1", "yes", "on")
