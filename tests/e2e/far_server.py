"""An inference server that does not see the trainer's disk: it fetches weights over a slow link."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil

from grpo_core.closing import ClosesOnExit
from grpo_core.weights.servers import ServerState, ServerStatus
from grpo_core.weights.version_log import VersionLog
from grpo_core.wire.policy_version import PolicyVersion
from grpo_runs.process.ports import free_port
from tests.e2e.demo_run import DEADLINE_S
from tests.e2e.several_servers import RunningDemo, send
from tests.support.wait import wait_for

_LOOK_AGAIN_S = 0.001
BYTES_PER_S = 4e6
"""A version of the tiny model, 4 MB, takes a second."""
_BEHIND_LINK = f"""
import asyncio, runpy
from grpo_vllm.weights.fetch import HttpTransport
read = HttpTransport.read
async def slowly(self, *asked, **further):
    found = await read(self, *asked, **further)
    await asyncio.sleep(len(found) / {BYTES_PER_S})
    return found
HttpTransport.read = slowly
runpy.run_module("grpo_vllm", run_name="__main__")
"""


class FarServer(ClosesOnExit):
    """One more server of a run whose others see the trainer's disk. Args: directory: for its files

    `versions`: what it and the others report."""

    name = "far"

    def __init__(self, run: RunningDemo, directory: Path) -> None:
        self._run = run
        self._directory = directory
        directory.mkdir()
        like = run.server("server-0")
        words = like.cmdline()
        run_id = words[words.index("--run-id") + 1]
        self.versions = VersionLog(like.environ()["REDIS_URL"], run_id, DEADLINE_S)
        self._port = free_port()
        self._starts = 0

    def close(self) -> None:
        self.versions.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def log(self) -> str:
        """Of the newest start."""
        return (self._directory / f"{self.name}-{self._starts}.log").read_text()

    def head(self) -> PolicyVersion:
        head = self.versions.head()
        assert head is not None
        return head.version

    def _serves(self) -> bool:
        return self.name in self.names() and self.status().state is ServerState.SERVING

    def names(self) -> list[str]:
        """Of all servers that are not gone."""
        return [server.name for server in self.versions.servers()]

    def status(self) -> ServerStatus:
        return next(server for server in self.versions.servers() if server.name == self.name)

    @contextlib.contextmanager
    def started(self) -> Iterator[psutil.Process]:
        """Inside the block, it has joined the run; it is killed at the end."""
        process = self._start()
        try:
            wait_for(lambda: self._serves() or process.poll() is not None, bool, DEADLINE_S)
            assert process.poll() is None, self.log
            yield psutil.Process(process.pid)
        finally:
            send(psutil.Process(process.pid), signal.SIGKILL)
            process.wait()

    def refused(self, *flags: str) -> str:
        """Start it with these options, with which it ends by itself. Returns its log."""
        assert self._start(*flags).wait(DEADLINE_S) == 1, self.log
        return self.log

    def _start(self, *flags: str) -> subprocess.Popen[bytes]:
        self._starts += 1
        return self._run.start_another(
            self.name,
            self._directory / f"{self.name}-{self._starts}.log",
            *("--staging-dir", str(self._directory), *flags),
            module=("-c", _BEHIND_LINK),
            port=self._port,
            weights_dir=self._directory / "nothing",
        )

    def stopped_while(
        self, process: psutil.Process, is_reached: Callable[[ServerStatus], bool]
    ) -> ServerStatus:
        """Stop all its processes in a state that it reports. Returns that report."""
        give_up_at = time.monotonic() + DEADLINE_S
        while not is_reached(self.status()) or not self._still(process, is_reached):
            assert time.monotonic() < give_up_at, self.log
            time.sleep(_LOOK_AGAIN_S)
        return self.status()

    def _still(self, process: psutil.Process, is_reached: Callable[[ServerStatus], bool]) -> bool:
        """Stop it. If the state was over before the signal, let it go on."""
        send(process, signal.SIGSTOP)
        if is_reached(self.status()):
            return True
        send(process, signal.SIGCONT)
        return False

    def others_serve(self, version: PolicyVersion) -> float:
        """Seconds until all other servers of the run do."""
        began = time.monotonic()
        wait_for(
            lambda: [
                one.version
                for one in self.versions.servers()
                if one.name != self.name and one.version < version
            ],
            lambda older: not older,
            DEADLINE_S,
        )
        return time.monotonic() - began


class Askers:
    """Ask a server for completions all the time. `versions`: those that sampled the first tokens of
    the answers; `refused`: requests that were answered with status 503."""

    def __init__(self, url: str, count: int = 4) -> None:
        self._url = url
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(count)]
        self.versions: list[PolicyVersion] = []
        self.refused = 0

    def __enter__(self) -> Askers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        body = {"prompt": {"prompt_token_ids": [1, 2, 3]}, "logprobs": 0, "max_tokens": 4}
        with httpx.Client(timeout=DEADLINE_S) as client:
            while not self._stop.is_set():
                answer = client.post(f"{self._url}/generate", json=body)
                if answer.status_code == 503:
                    self.refused += 1
                    continue
                answer.raise_for_status()
                ((first, _last),) = answer.json()["policy_version"]
                self.versions.append(PolicyVersion(*first))
