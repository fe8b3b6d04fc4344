"""A run in containers whose containers can be killed and stopped, as `tests.whole_run.rig` has
one of processes. What is killed comes back as Compose brings it back."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

from tests.containers.conftest import BASE_IMAGE, TAG, build_settings
from tests.containers.stack import ROOT, RUN_WITHIN_S, Stack, docker, own_ports, run
from tests.support.wait import wait_for
from tests.whole_run.commands import (
    ENGINE,
    ENVIRONMENT,
    REDIS,
    RUN_API,
    SERVER,
    TRAINER,
    Shape,
    server_names,
)
from tests.whole_run.journal import JOURNAL, Journals
from tests.whole_run.rig import Rig, server_of

T = TypeVar("T")

_POLL_S = 0.5
_PROBE = ("python3", "-m", "grpo_core.clients.health_probe", "http://127.0.0.1:10001/readyz")
_STOP_S = 120
_PORTS = 32
"""Of a range on the host, for several servers."""


class ContainerRig(Rig):
    """Its processes are those of Docker. Args: directory: for what the environment notes"""

    def __init__(self, directory: Path, shape: Shape) -> None:
        self.mode, self._shape = shape.mode, shape
        noted = directory / JOURNAL
        noted.mkdir(mode=0o777)
        noted.chmod(0o777)  # the containers' user is another one
        self.journals = Journals(noted)
        self._site = contextlib.ExitStack()
        settings = self._site.enter_context(build_settings(directory))
        settings |= own_ports() | {"STACK_TAG": TAG, "STACK_DEVICE": "cpu", "CPU_THREADS": "1"}
        settings |= {
            "COMPOSE_FILE": f"{ROOT}/docker-compose.yml:{ROOT}/tests/whole_run/chaos/compose.yml"
        }
        settings |= {"CHAOS_ROOT": str(ROOT), "CHAOS_JOURNAL": str(noted)}
        settings |= {"TASK": "/chaos/tests/whole_run/sums.py:Sums", "STEPS": "100000"}
        settings |= {"BATCH_SIZE": "8", "GROUP_SIZE": "4", "MAX_COMPLETION_TOKENS": "8"}
        settings |= {"ENVIRONMENT_FLAGS": "--drop-equal-scores false"}
        if shape.servers > 1:
            first = int(settings["VLLM_PORT"])
            settings |= {
                "REPLICAS": str(shape.servers),
                "VLLM_PORT": f"{first}-{first + _PORTS}",
            }
        name = self.mode.replace("_", "-")
        self._stack = Stack(self.mode, f"grpo-chaos-{name}", settings)
        self.run_api_url = f"http://127.0.0.1:{settings['RUN_API_PORT']}"
        self._suffix = "shared" if self.mode == "shared_vllm" else name

    def start(self, *_: str) -> None:
        """All of it, with images that are built."""
        if not docker("images", "--quiet", BASE_IMAGE):
            run(["bash", f"{ROOT}/tests/containers/make_base.sh", BASE_IMAGE])
        built = self._stack.compose("build")
        assert built.returncode == 0, built.stderr[-5000:]
        self._stack.up_well()
        self.checkpoints = self._mount()
        self._metrics = self.checkpoints / "metrics.jsonl"

    def _mount(self) -> Path:
        """Where the volume of checkpoints is on the host."""
        mounts = json.loads(docker("inspect", "--format", "{{json .Mounts}}", self._id(TRAINER)))
        (found,) = [mount for mount in mounts if mount["Destination"] == "/checkpoints"]
        return Path(found["Source"]) / self.mode

    def kill(self, *names: str) -> None:
        """Send SIGKILL, as a host does that has no memory left."""
        for name in names:
            for process in self._hit_by(name):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def _hit_by(self, name: str) -> list[psutil.Process]:
        root = self._root(server_of(name))
        if not name.startswith(ENGINE):
            return [root]
        return [each for each in root.children(recursive=True) if "Engine" in each.name()]

    def _root(self, name: str) -> psutil.Process:
        inspect = ("inspect", "--format", "{{.State.Pid}}", self._id(name))
        return psutil.Process(self.wait_for(lambda: int(docker(*inspect))))

    def stop_for(self, seconds: float, *names: str) -> None:
        """Freeze containers, and let them go on."""
        found = [self._id(server_of(name)) for name in names]
        for container in found:
            docker("pause", container)
        time.sleep(seconds)
        for container in found:
            docker("unpause", container)

    def start_what_is_dead(self) -> None:
        """Compose does that."""
        for name in (REDIS, RUN_API, *server_names(self._shape.servers), ENVIRONMENT, TRAINER):
            self.wait_until_ready(name)

    def wait_until_ready(self, name: str) -> None:
        container = self._id(name)

        def state() -> str:
            found = json.loads(docker("inspect", "--format", "{{json .State}}", container))
            health: str = found.get("Health", {}).get("Status", "healthy")
            return health if found["Running"] else found["Status"]

        def is_ready(state: str) -> bool:
            if state == "exited":  # Docker's limit of restarts counts over a container's life
                docker("start", container)
            return state == "healthy"

        self.wait_for(state, is_ready)
        if name.startswith(SERVER):  # Docker asks too seldom to see an engine that restarts
            probe = ["docker", "exec", container, *_PROBE]
            self.wait_for(lambda: run(probe).returncode == 0)

    def wait_for(self, read: Callable[[], T], accept: Callable[[T], bool] = bool) -> T:
        def slowly() -> T:
            time.sleep(_POLL_S)
            return read()

        try:
            return wait_for(slowly, accept, RUN_WITHIN_S)
        except AssertionError as late:
            raise AssertionError(f"{late}\n{self._stack.logs()}") from None

    def end(self, *names: str) -> None:
        for name in names:
            docker("stop", "--time", str(_STOP_S), self._id(name))
            ended = docker("inspect", "--format", "{{.State.ExitCode}}", self._id(name)).strip()
            assert ended == "0", self._stack.logs()

    def close(self) -> None:
        self._stack.down()
        self._site.close()

    def processes(self) -> list[psutil.Process]:
        names = (REDIS, RUN_API, *server_names(self._shape.servers), ENVIRONMENT, TRAINER)
        roots = [self._root(name) for name in names]
        return [each for root in roots for each in (root, *root.children(recursive=True))]

    def _id(self, name: str) -> str:
        if name.startswith(SERVER):
            service = f"{SERVER}-{self._suffix}"
            return self._stack.containers(service)[server_names(self._shape.servers).index(name)]
        own = name in (REDIS, RUN_API)
        return self._stack.container(name if own else f"{name}-{self._suffix}")
