"""Starts the inference server if the mode may do so, and creates the mode's weight-sync object."""

from __future__ import annotations

import contextlib
import importlib.util
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import structlog

from grpo_core.clients.inference import BridgeClient
from grpo_core.deadline import Deadline
from grpo_core.gpu import VISIBLE_GPUS, visible_gpu
from grpo_core.listening import LOOPBACK
from grpo_core.process import ManagedProcess, ProcessFailed
from grpo_core.security import is_loopback, plain
from grpo_core.sockets import proxy_for
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.tree.weights import (
    RestartSettings,
    SharedVllmSettings,
    TransportSettings,
    served_weights_directory,
)
from grpo_core.weights.version_log import VersionLog
from grpo_trainer.checkpoint.store import OpenedEpochs
from grpo_trainer.errors import MissingPackage, NoInferenceServer
from grpo_trainer.model.adapter import served_rank
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.weight_sync.attachment import ServerConnection
from grpo_trainer.weight_sync.base import WeightSync
from grpo_trainer.weight_sync.collective import CollectiveDirectories
from grpo_trainer.weight_sync.directories import VersionDirectories
from grpo_trainer.weight_sync.files import FileSync
from grpo_trainer.weight_sync.servers import Publisher, ServerWatch
from grpo_trainer.weight_sync.shared import SharedVllm
from grpo_trainer.weight_sync.source import WeightSource

log = structlog.get_logger()

PACKAGE = "grpo_vllm"
LOG = "vllm_server.log"
STARTS_SERVER_WITH = ("vllm_gpu", "gpu_memory_utilization", "max_model_len")
"""Options for a server that grpo starts. Command lines of the archived trainer pass them in every
mode, so if grpo starts no server it only logs that they are unused."""
MAX_MODEL_LEN = 4096
"""The default of --max-model-len, unless the model allows less."""
END_GRACE_S = 60.0
"""Time for the server to answer its requests in flight."""
_POLL_S = 0.2
_CONNECT_S = 2.0
_LEAST_SILENT_S = 1.0


@contextlib.contextmanager
def open_weight_sync(
    settings: TrainerSettings, starts_from_model: bool = False
) -> Iterator[WeightSync]:
    """That of the mode, with its inference server, which is started if the mode may do so. Args:
    starts_from_model: see `SharedVllm`"""
    with (
        inference_server(settings),
        contextlib.closing(build_weight_sync(settings, starts_from_model)) as sync,
    ):
        yield sync


def build_weight_sync(settings: TrainerSettings, starts_from_model: bool = False) -> WeightSync:
    """Create the object without sending a request. Args: starts_from_model: see `SharedVllm`"""
    chosen, api_key = settings.sync, plain(settings.vllm_api_key)

    def connected(url: str, control_url: str | None = None) -> BridgeClient:
        return BridgeClient(url, settings.service_deadline_s, control_url, api_key)

    if isinstance(chosen, SharedVllmSettings):
        bridge = connected(settings.inference_url, chosen.vllm_control_url)
        server = ServerConnection(
            bridge,
            chosen.weights_socket,
            chosen.vllm_config_path,
            settings.dtype,
            settings.device,
            settings.server_return_deadline_s,
        )
        return SharedVllm(
            server,
            settings.model,
            lease_s=chosen.pause_lease_s,
            epochs=OpenedEpochs(settings.save_path),
            verify_every_steps=chosen.verify_every_steps,
            starts_from_model=starts_from_model,
        )
    redis_url = settings.redis_url.get_secret_value()
    versions = VersionLog(redis_url, settings.run_id or "", settings.service_deadline_s)
    watch = ServerWatch(versions, settings.server_return_deadline_s)
    served = served_weights_directory(settings.save_path)
    directories = VersionDirectories(served, with_deltas=settings.lora is None)
    if isinstance(chosen, TransportSettings) and chosen.weight_transport == "collective":
        host = settings.master_addr if settings.num_inference_nodes else LOOPBACK
        silent_s = max(chosen.publish_wait_s, _LEAST_SILENT_S)
        directories = CollectiveDirectories(served, watch, host, silent_s)
    return FileSync(
        bridge=connected(settings.inference_url),
        connect=connected,
        watch=watch,
        publisher=Publisher(watch, chosen.publish_wait_s, chosen.publish_deadline_s),
        source=_source(settings, served),
        restarts=chosen.restarts_engine,
        nodes=settings.num_inference_nodes,
        weights=TrainedWeights.of(settings),
        directories=directories,
        dtype=settings.dtype,
        device=settings.device,
        every_steps=chosen.publish_every_steps,
        last_step=settings.steps,
    )


def _source(settings: TrainerSettings, root: Path) -> WeightSource:
    if not settings.num_inference_nodes:
        return WeightSource(root, None, 0, settings.vllm_api_key)
    import torch.distributed

    port = settings.master_port + torch.distributed.is_initialized()
    return WeightSource(root, settings.master_addr, port, settings.vllm_api_key)


@contextlib.contextmanager
def inference_server(settings: TrainerSettings) -> Iterator[None]:
    """Inside the block, a server listens at the configured URL. The end of the block stops a server
    that was started here.

    Raises:
        NoInferenceServer: nothing listens there before the deadline; names the command to start.
            With --num-inference-nodes, and with --run-id, the servers are found in Redis instead.
        MissingPackage: the server's package is not installed.
        NoSuchDevice: --vllm-gpu names a GPU that this process cannot see.
    """
    chosen, (host, port) = settings.sync, _address(settings.inference_url)
    is_local = is_loopback(host)
    if settings.num_inference_nodes and settings.run_id:
        _mention_unused(settings)
        yield  # the servers are found in Redis
    elif settings.num_inference_nodes:
        _wait_for(settings, host, port)
        yield
    elif isinstance(chosen, RestartSettings) and is_local and not _listens(host, port):
        with _started_server(settings, chosen.vllm_flags, port):
            yield
    else:
        _mention_unused(settings)
        _wait_for(settings, host, port)
        yield


@contextlib.contextmanager
def _started_server(settings: TrainerSettings, more_flags: str, port: int) -> Iterator[None]:
    """Run `vllm-api-server` as a child process. Ctrl-C in a terminal reaches only the trainer,
    which then stops it."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise MissingPackage(
            f"mode {settings.sync.mode} starts vllm-api-server, but {PACKAGE} is not installed "
            "on this host; install it (make install), or start the server yourself:  "
            + command_to_start(settings, port)
        )
    command = [sys.executable, "-m", PACKAGE, *server_flags(settings, port)]
    # A variable such as VLLM_ENABLE_SHARED_WEIGHTS may say otherwise.
    command += ["--no-share-weights"]
    command += sizing_flags(settings, more_flags, _has_gpu())
    log_path = settings.save_path / LOG
    child = ManagedProcess("vllm-api-server", command, log_path, _environment(settings))
    log.info("server.started", pid=child.pid, log=str(log_path))
    try:
        seconds = child.wait_until(
            lambda: _serves(settings.inference_url),
            settings.server_return_deadline_s,
            "--server-return-deadline-s",
        )
        log.info("server.ready", seconds=round(seconds, 1))
        yield
    except ProcessFailed as error:
        raise NoInferenceServer(str(error)) from error
    finally:
        child.stop(END_GRACE_S)


def server_flags(settings: TrainerSettings, port: int) -> list[str]:
    """The mode's options of `vllm-api-server`. Redis is passed in REDIS_URL, because other users
    can read a command line and the URL may hold a password."""
    flags = ["--model", settings.model, "--port", str(port), "--dtype", settings.dtype]
    if not settings.sync.uses_files:
        return [*flags, "--share-weights"]
    flags += ["--run-id", settings.run_id] if settings.run_id else []
    flags += ["--weights-dir", str(served_weights_directory(settings.save_path))]
    if settings.lora is not None:
        flags += ["--enable-lora", "--max-lora-rank", str(served_rank(settings.lora.r))]
    return flags


def sizing_flags(settings: TrainerSettings, more_flags: str, has_gpu: bool) -> list[str]:
    """Options that size a server which grpo starts."""
    flags = ["--max-model-len", str(settings.max_model_len or _longest(settings.model))]
    if has_gpu or "gpu_memory_utilization" in settings.model_fields_set:
        flags += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
    return flags + shlex.split(more_flags)


def command_to_start(settings: TrainerSettings, port: int) -> str:
    """The shell command that starts a suitable server, for messages."""
    needs_url = settings.sync.uses_files and "redis_url" in settings.model_fields_set
    redis = 'REDIS_URL="<the trainer\'s>" ' if needs_url else ""
    return redis + shlex.join(["vllm-api-server", *server_flags(settings, port)])


def _wait_for(settings: TrainerSettings, host: str, port: int) -> None:
    command, is_logged = command_to_start(settings, port), False
    deadline = Deadline(settings.service_deadline_s)
    while not _listens(host, port):
        if not is_logged:
            log.warning(
                "server.unavailable",
                url=settings.inference_url,
                hint=f"start the server: {command}",
            )
            is_logged = True
        if deadline.has_passed:
            raise NoInferenceServer(
                f"nothing listens at {settings.inference_url} after "
                f"{settings.service_deadline_s:g} s. Start the inference server:\n  {command}"
            )
        time.sleep(_POLL_S)


def _mention_unused(settings: TrainerSettings) -> None:
    given = [name for name in STARTS_SERVER_WITH if name in settings.model_fields_set]
    if given:
        options = ", ".join("--" + name.replace("_", "-") for name in given)
        log.info("options.unused", options=options, reason="grpo starts no server in this run")


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


def _serves(url: str) -> bool:
    try:
        way = httpx.HTTPTransport(proxy=proxy_for(url))
        with httpx.Client(transport=way, timeout=_CONNECT_S) as http:
            return http.get(f"{url}/health").is_success
    except httpx.TransportError:
        return False


def _environment(settings: TrainerSettings) -> dict[str, str]:
    """Variables for the server, added to this process's own."""
    api_key = plain(settings.vllm_api_key)
    gpu = settings.vllm_gpu
    values = {
        "REDIS_URL": settings.redis_url.get_secret_value(),
        "VLLM_API_KEY": api_key,
        VISIBLE_GPUS: None if gpu is None else visible_gpu(gpu, f"--vllm-gpu {gpu}"),
    }
    return {name: value for name, value in values.items() if value is not None}


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _longest(model_name: str) -> int:
    from transformers import AutoConfig

    limit = getattr(AutoConfig.from_pretrained(model_name), "max_position_embeddings", None)
    return min(MAX_MODEL_LEN, limit or MAX_MODEL_LEN)
