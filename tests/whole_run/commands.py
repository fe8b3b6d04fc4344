"""Command lines of the processes of a run that the fault tests kill."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from grpo_core.redis.server import bundled_redis, redis_command
from grpo_runs.process.ports import free_port
from tests.fixtures.inference import SMALL
from tests.support.preloaded import MODULE as PRELOADED
from tests.support.preloaded import VARIABLE as FORK_SOCKET
from tests.support.preloaded import fork_socket

REDIS, RUN_API, SERVER = "redis", "run-api", "vllm-server"
TRAINER, ENVIRONMENT = "trainer", "environment"
ENGINE, SUPERVISOR = "engine", "supervisor"
"""Of a server, which is its supervisor with all below it."""
WORKER, RANK = "worker", "rank"
"""The process of an engine that computes, and one of the trainer's processes, by its number."""
REWARD_WORKER = "reward-worker"
"""Any one of the environment's."""
NODE = "node"
"""A host, by its number, with all its processes."""
RENDEZVOUS = "rendezvous"
"""Name of a port."""
SHARED = "shared_vllm"
LORA_ONLY, LORA_RESTART = "lora_only", "lora_restart"
FILES, COLLECTIVE = "files", "collective"
OTHER_MODES = (LORA_ONLY, LORA_RESTART, "none")
RESTART_EVERY_STEPS = 3
BATCH_SIZE = 16
STATE_INTERVAL = 3
SUMS = Path(__file__).with_name("sums.py")
FIRST_NODE = "10.0.0.1"
LONGER_THAN_ANY_WAIT_S = 3600
"""For leases and deadlines that no test may reach."""


def server_names(number: int) -> tuple[str, ...]:
    return (SERVER, *(f"{SERVER}-{index}" for index in range(1, number)))


def trainer_names(nodes: int) -> tuple[str, ...]:
    return (TRAINER, *(f"{TRAINER}-{index}" for index in range(1, nodes)))


def health_of(server: str) -> str:
    """Name of a port."""
    return f"health of {server}"


@dataclass(frozen=True)
class Shape:
    """Args:
    mode: the weight-sync mode
    servers: number of inference servers; several follow the versions in Redis
    ranks: number of trainer processes
    nodes: number of hosts among which the ranks are divided; the first has all other processes too
    fsdp: divides the weights among the ranks, and so the checkpoints
    transport: of weights
    as_shipped: with the deadlines that users get, and rewards in worker processes
    is_pretrained: SmolLM2 in place of the tiny model
    in_containers: of Compose, which restarts what is killed
    queue_limit: number of groups from which on run-api delays submissions; 0: its default. The
        environment then fills the queue
    hosts: (client, server) → the host name by which this client reaches the server; else 127.0.0.1
    """

    mode: str
    servers: int = 1
    ranks: int = 1
    nodes: int = 1
    fsdp: bool = False
    transport: str = FILES
    as_shipped: bool = False
    is_pretrained: bool = False
    in_containers: bool = False
    queue_limit: int = 0
    hosts: Mapping[tuple[str, str], str] = field(default_factory=dict)

    @property
    def start_order(self) -> tuple[tuple[str, ...], ...]:
        """Processes of one row start at the same time."""
        services, trainers = (RUN_API, *server_names(self.servers)), trainer_names(self.nodes)
        if self.transport == COLLECTIVE:  # a server may wait for weights that only a trainer has
            return ((REDIS,), (*services, *trainers), (ENVIRONMENT,))
        return ((REDIS,), services, trainers, (ENVIRONMENT,))

    def on(self, node: str) -> list[str]:
        """The processes of a host."""
        elsewhere = trainer_names(self.nodes)[1:]
        if index := int(node.removeprefix(f"{NODE}-")):
            return [elsewhere[index - 1]]
        return [name for row in self.start_order for name in row if name not in elsewhere]

    def ports(self) -> dict[str, int]:
        names = server_names(self.servers)
        health = [health_of(name) for name in names]
        single = (REDIS, RUN_API, TRAINER, RENDEZVOUS)
        return {name: free_port() for name in (*single, *names, *health)}


@dataclass
class Commands:
    """Args: directory: logs, metrics, journals, checkpoints and Redis' files"""

    directory: Path
    model: Path
    shape: Shape

    def __post_init__(self) -> None:
        self.mode, self.as_shipped = self.shape.mode, self.shape.as_shipped
        self.ports, self.start_order = self.shape.ports(), self.shape.start_order
        # Unix socket paths are limited to 107 bytes, and pytest's directories may be longer.
        self._sockets = tempfile.TemporaryDirectory(prefix="grpo-")

    def close(self) -> None:
        self._sockets.cleanup()

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    def url(self, name: str, client: str = "") -> str:
        return f"http://{self._host(name, client)}:{self.ports[name]}"

    def _host(self, name: str, client: str) -> str:
        return self.shape.hosts.get((client, name), "127.0.0.1")

    def of(self, name: str) -> list[str]:
        python = [sys.executable, "-m"]
        if name.startswith(SERVER):
            return [*python, *self._server_module(), *self._server(name)]
        commands: dict[str, Callable[[], list[str]]] = {
            REDIS: self._redis,
            RUN_API: lambda: [*python, "grpo_api", *self._run_api()],
            TRAINER: lambda: [*python, "tests.whole_run.staged_trainer", *self._trainer()],
            ENVIRONMENT: lambda: [*python, *self._environment_module(), *self._environment()],
        }
        if name.startswith(TRAINER):
            return commands[TRAINER]()
        return commands[name]()

    def _redis(self) -> list[str]:
        directory = self.directory / REDIS
        directory.mkdir(exist_ok=True)
        return redis_command(self.ports[REDIS], directory, bundled_redis())

    def _run_api(self) -> list[str]:
        flags: dict[str, object] = {} if self.as_shipped else {"redis-deadline-s": 3}
        if limit := self.shape.queue_limit:
            flags["max-queued-groups"] = limit
        return _flags({"port": self.ports[RUN_API], **flags, **self._of_the_run(RUN_API)})

    def variables(self) -> dict[str, str]:
        """Beside those that every process of a rig gets."""
        return {FORK_SOCKET: fork_socket()} if self.mode == SHARED else {}

    def _server_module(self) -> list[str]:
        """In the file modes the supervisor starts its own fork server: a test kills the supervisor
        alone, and the kernel must end the engine."""
        return [PRELOADED, "serve"] if self.mode == SHARED else ["grpo_vllm"]

    def _server(self, name: str) -> list[str]:
        flags = {
            "model": self.model,
            "port": self.ports[name],
            "health-port": self.ports[health_of(name)],
            "server-name": name,
            "dtype": "float32",
            **self._of_the_run(SERVER),
        }
        if self.mode == SHARED:
            config = self.directory / "vllm_bridge_config.json"
            socket = f"{self._sockets.name}/weights.sock"
            flags |= {"weights-socket": socket, "bridge-config-path": config}
            if not self.as_shipped:
                flags["max-pause-lease-s"] = LONGER_THAN_ANY_WAIT_S
            return ["--share-weights", *_flags(flags), *SMALL]
        flags["weights-dir"] = self.checkpoints / "served_weights"
        lora = ["--enable-lora"] if self.mode in (LORA_ONLY, LORA_RESTART) else []
        return [*lora, *_flags(flags), *SMALL]

    def _environment_module(self) -> list[str]:
        task = f"{SUMS}:Sums" if self.as_shipped else "arithmetic"
        return ["tests.whole_run.journalled_environment", task, "serve"]

    def _environment(self) -> list[str]:
        never = {} if self.as_shipped else {"run-api-deadline-s": LONGER_THAN_ANY_WAIT_S}
        return _flags(
            {
                "run-api-url": self.url(RUN_API, ENVIRONMENT),
                "group-size": 4,
                "max-completion-tokens": 8,
                "max-batches-offpolicy": 50 if self.shape.queue_limit else 2,
                "drop-equal-scores": "false",
                "inference-url": self.url(SERVER, ENVIRONMENT),
                "model": self.model,
                **never,
            }
        )

    def _lr(self) -> float:
        """With which a publication moves the logprobs, and no model is lost."""
        if self.shape.is_pretrained:
            return 1e-5
        return 2e-3 if self.mode in (LORA_ONLY, LORA_RESTART) else 3e-4

    def _trainer(self) -> list[str]:
        flags = {
            "model": self.model,
            "mode": self.mode,
            "run-api-url": self.url(RUN_API, TRAINER),
            "inference-url": self.url(SERVER, TRAINER),
            "steps": 100_000,  # more than any test needs
            "batch-size": BATCH_SIZE // 2,
            "gradient-accumulation-steps": 2,
            "lr": self._lr(),
            "seq-len": 128,
            "metrics-file": self.directory / "metrics.jsonl",
            "save-path": self.checkpoints,
            "checkpoint-interval": 0,
            "state-interval": STATE_INTERVAL,
        }
        if self.mode == SHARED:
            lease = {} if self.as_shipped else {"pause-lease-s": LONGER_THAN_ANY_WAIT_S}
            return _flags(flags | {"verify-every-steps": 1} | lease)
        if self.mode != LORA_ONLY:
            flags["vllm-restart-interval"] = RESTART_EVERY_STEPS
        shape, flags = self.shape, flags | self._of_the_run(TRAINER)
        if shape.servers > 1:
            flags |= {"num-inference-nodes": shape.servers, "master-port": self.ports[TRAINER]}
        if shape.transport != FILES:
            flags["weight-transport"] = shape.transport
        if shape.ranks > 1:
            flags["ranks"] = shape.ranks // shape.nodes
        if shape.nodes > 1:
            meeting = f"{FIRST_NODE}:{self.ports[RENDEZVOUS]}"
            flags |= {"nodes": shape.nodes, "rendezvous": meeting}
        return [*_flags(flags), *["--fsdp"] * shape.fsdp]

    def _of_the_run(self, client: str) -> dict[str, object]:
        url = f"redis://{self._host(REDIS, client)}:{self.ports[REDIS]}/0"
        return {"redis-url": url, "run-id": "faults"}


def _flags(options: dict[str, object]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]
