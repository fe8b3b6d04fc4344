"""Who starts the inference server: `grpo` itself, as its child, in the modes that restart it; else
the user, who is told what to type."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import structlog

from grpo_core.process.children import end_with_parent
from grpo_core.process.closing import ClosesOnExit
from grpo_core.security.bearer_token import plain
from grpo_trainer.config.modes import STARTS_SERVER_WITH
from grpo_trainer.config.trainer import TrainerSettings
from grpo_trainer.errors import MissingPackage, NoInferenceServer, NoSuchDevice
from grpo_trainer.weight_sync.files.server_command import (
    command_to_start,
    server_flags,
    sizing_flags,
)

log = structlog.get_logger()

PACKAGE = "grpo_vllm"
LOG = "vllm_server.log"
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
END_GRACE_S = 60.0
"""The server lets requests finish first."""
_POLL_S = 0.2
_CONNECT_S = 2.0
_LOG_TAIL_LINES = 15


@contextlib.contextmanager
def inference_server(settings: TrainerSettings) -> Iterator[None]:
    """Inside, something listens at the server's URL. What was started here is ended with the block.

    Raises:
        NoInferenceServer: nothing does, within the deadline; says what to start.
        MissingPackage: the server is to be started and is not installed.
        NoSuchDevice: --vllm-gpu names a GPU that this process does not see.
    """
    host, port = _address(settings.inference_url)
    if settings.mode.restarts and host in LOOPBACK and not _listens(host, port):
        with ServerChild(settings, port) as child:
            child.wait_until_serving(settings.server_return_deadline_s)
            yield
    else:
        _mention_unused(settings)
        _wait_for(settings, host, port)
        yield


class ServerChild(ClosesOnExit):
    """`vllm-api-server` in a session of its own: a terminal's Ctrl-C reaches the trainer alone,
    which then ends it. Should the trainer be killed, the kernel sends it SIGTERM."""

    def __init__(self, settings: TrainerSettings, port: int) -> None:
        if importlib.util.find_spec(PACKAGE) is None:
            raise MissingPackage(
                f"mode {settings.mode} starts vllm-api-server, and {PACKAGE} is not installed "
                "here; install it (make install), or start the server where it is: "
                + command_to_start(settings, port)
            )
        self.log_path = settings.save_path / LOG
        self._url = settings.inference_url
        command = [sys.executable, "-m", PACKAGE, *server_flags(settings, port)]
        command += sizing_flags(settings, _has_gpu())
        with self.log_path.open("ab") as output:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(settings),
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        log.info("started the inference server", pid=self._child.pid, log=str(self.log_path))

    def wait_until_serving(self, deadline_s: float) -> None:
        """Raises `NoInferenceServer` where it ended, or does not answer in time."""
        started = time.monotonic()
        while not self._serves():
            code = self._child.poll()
            if code is not None:
                raise NoInferenceServer(
                    f"vllm-api-server ended with status {code} while starting; see "
                    f"{self.log_path}\n{self._log_tail()}"
                )
            if time.monotonic() - started >= deadline_s:
                raise NoInferenceServer(
                    f"vllm-api-server does not answer after {deadline_s:g} s; see {self.log_path}, "
                    f"or raise --server-return-deadline-s\n{self._log_tail()}"
                )
            time.sleep(_POLL_S)
        log.info("the inference server serves", seconds=round(time.monotonic() - started, 1))

    def close(self) -> None:
        """TERM, then KILL for it and what it started, each by this handle."""
        if self._child.poll() is None:
            self._child.terminate()
        try:
            self._child.wait(END_GRACE_S)
        except subprocess.TimeoutExpired:
            log.warning("the inference server does not end; killing it", pid=self._child.pid)
            # Not waited for yet, so its process group can be nobody else's.
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()

    def _serves(self) -> bool:
        try:
            return httpx.get(f"{self._url}/health", timeout=_CONNECT_S).is_success
        except httpx.TransportError:
            return False

    def _log_tail(self) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])


def _wait_for(settings: TrainerSettings, host: str, port: int) -> None:
    command, told = command_to_start(settings, port), False
    give_up_at = time.monotonic() + settings.service_deadline_s
    while not _listens(host, port):
        if not told:
            log.warning("no inference server yet", url=settings.inference_url, start=command)
            told = True
        if time.monotonic() >= give_up_at:
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


def _environment(settings: TrainerSettings) -> dict[str, str]:
    environment = dict(os.environ)
    url = plain(settings.redis_url)
    if url is not None:
        environment["REDIS_URL"] = url
    key = plain(settings.vllm_api_key)
    if key is not None:
        environment["VLLM_API_KEY"] = key
    if settings.vllm_gpu is not None:
        visible = environment.get(VISIBLE_GPUS)
        environment[VISIBLE_GPUS] = _visible_gpu(settings.vllm_gpu, visible)
    return environment


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
