"""Starts the inference server if the mode restarts it; otherwise the log says what to type."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import structlog

from grpo_core.deadline import Deadline
from grpo_core.process.managed import ManagedProcess, ProcessFailed
from grpo_core.security.bearer_token import plain
from grpo_trainer.config.sync import RestartSettings, served_weights_directory
from grpo_trainer.config.trainer import TrainerSettings
from grpo_trainer.errors import MissingPackage, NoInferenceServer, NoSuchDevice
from grpo_trainer.model.adapter import served_rank

log = structlog.get_logger()

PACKAGE = "grpo_vllm"
LOG = "vllm_server.log"
STARTS_SERVER_WITH = ("vllm_gpu", "gpu_memory_utilization", "max_model_len")
"""Command lines of the archived trainer name them in every mode. If grpo starts no server, the log
mentions them."""
MAX_MODEL_LEN = 4096
"""Without --max-model-len, if the model allows as much."""
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
END_GRACE_S = 60.0
"""The server lets requests finish first."""
_POLL_S = 0.2
_CONNECT_S = 2.0


@contextlib.contextmanager
def inference_server(settings: TrainerSettings) -> Iterator[None]:
    """Inside, something listens at the server's URL. What was started here is ended with the block.

    Raises:
        NoInferenceServer: nothing does, within the deadline; says what to start.
        MissingPackage: the server is to be started and is not installed.
        NoSuchDevice: --vllm-gpu names a GPU that this process does not see.
    """
    chosen, (host, port) = settings.sync, _address(settings.inference_url)
    is_local = host in LOOPBACK
    if isinstance(chosen, RestartSettings) and is_local and not _listens(host, port):
        with _started_server(settings, chosen.vllm_flags, port):
            yield
    else:
        _mention_unused(settings)
        _wait_for(settings, host, port)
        yield


@contextlib.contextmanager
def _started_server(settings: TrainerSettings, more_flags: str, port: int) -> Iterator[None]:
    """`vllm-api-server` as a child. A terminal's Ctrl-C reaches the trainer alone, which then ends
    it."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise MissingPackage(
            f"mode {settings.sync.mode} starts vllm-api-server, and {PACKAGE} is not installed "
            "here; install it (make install), or start the server where it is: "
            + command_to_start(settings, port)
        )
    command = [sys.executable, "-m", PACKAGE, *server_flags(settings, port)]
    command += sizing_flags(settings, more_flags, _has_gpu())
    log_path = settings.save_path / LOG
    child = ManagedProcess("vllm-api-server", command, log_path, _environment(settings))
    log.info("started the inference server", pid=child.pid, log=str(log_path))
    try:
        seconds = child.wait_until(
            lambda: _serves(settings.inference_url), settings.server_return_deadline_s
        )
        log.info("the inference server serves", seconds=round(seconds, 1))
        yield
    except ProcessFailed as error:
        advice = "if it only needs longer, raise --server-return-deadline-s"
        raise NoInferenceServer(f"{error}\n{advice}") from error
    finally:
        child.stop(END_GRACE_S)


def server_flags(settings: TrainerSettings, port: int) -> list[str]:
    """Options of `vllm-api-server` that the mode needs. Redis is named by REDIS_URL: a command line
    is for all to read, and its URL may hold a password."""
    flags = ["--model", settings.model, "--port", str(port), "--dtype", settings.dtype]
    if not settings.sync.hands_off:
        return [*flags, "--share-weights"]
    flags += ["--run-id", settings.run_id]
    flags += ["--weights-dir", str(served_weights_directory(settings.save_path))]
    if settings.lora is not None:
        flags += ["--enable-lora", "--max-lora-rank", str(served_rank(settings.lora.r))]
    return flags


def sizing_flags(settings: TrainerSettings, more_flags: str, has_gpu: bool) -> list[str]:
    """Of a server that grpo starts."""
    flags = ["--max-model-len", str(settings.max_model_len or _longest(settings.model))]
    if has_gpu or "gpu_memory_utilization" in settings.model_fields_set:
        flags += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
    return flags + shlex.split(more_flags)


def command_to_start(settings: TrainerSettings, port: int) -> str:
    """To copy and paste."""
    redis = 'REDIS_URL="<that of the trainer>" ' if settings.sync.hands_off else ""
    return redis + shlex.join(["vllm-api-server", *server_flags(settings, port)])


def _wait_for(settings: TrainerSettings, host: str, port: int) -> None:
    command, told = command_to_start(settings, port), False
    deadline = Deadline(settings.service_deadline_s)
    while not _listens(host, port):
        if not told:
            log.warning("no inference server yet", url=settings.inference_url, start=command)
            told = True
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
        log.info("not used: they are for a server that grpo starts", options=options)


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
        return httpx.get(f"{url}/health", timeout=_CONNECT_S).is_success
    except httpx.TransportError:
        return False


def _environment(settings: TrainerSettings) -> dict[str, str]:
    """Beside this process's own."""
    redis_url, api_key = plain(settings.redis_url), plain(settings.vllm_api_key)
    gpu = settings.vllm_gpu
    values = {
        "REDIS_URL": redis_url,
        "VLLM_API_KEY": api_key,
        VISIBLE_GPUS: None if gpu is None else _visible_gpu(gpu, os.environ.get(VISIBLE_GPUS)),
    }
    return {name: value for name, value in values.items() if value is not None}


def _visible_gpu(index: int, visible: str | None) -> str:
    """Args: visible: the GPUs that this process sees, by number or UUID; None: all."""
    if visible is None:
        return str(index)
    gpus = [gpu.strip() for gpu in visible.split(",") if gpu.strip()]
    if index >= len(gpus):
        raise NoSuchDevice(
            f"--vllm-gpu {index}: {VISIBLE_GPUS}={visible} names {len(gpus)} GPUs, counted from 0"
        )
    return gpus[index]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _longest(model_name: str) -> int:
    from transformers import AutoConfig

    limit = getattr(AutoConfig.from_pretrained(model_name), "max_position_embeddings", None)
    return min(MAX_MODEL_LEN, limit or MAX_MODEL_LEN)
