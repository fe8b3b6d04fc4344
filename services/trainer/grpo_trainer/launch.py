"""Starts the ranks of this host with torchrun's agent, and all ranks again after one is lost.

The agents of several hosts meet in a store (c10d) on the host of `--rendezvous`, which has rank 0
after every restart too: no other host needs `--save-path`.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from urllib.parse import urlsplit

import psutil
import structlog
import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from grpo_core.cpu import CPU
from grpo_core.deadline import Deadline
from grpo_core.errors import GrpoError
from grpo_core.listening import LOOPBACK
from grpo_core.temporary import temporary_directory
from grpo_core.tree.optim import ProcessOptions
from grpo_trainer.errors import EXIT_LOST, LostRank
from grpo_trainer.stop import SAVE_GRACE_S, STARTED_BY, STOP_SIGNALS

MAX_RESTARTS = 10
"""On one host. An end that others see as the end of this host does not count."""
RUN = "grpo"
RETRY_S = 1.0
CONNECT_S = 5.0
THREADS, INTERFACE = "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"

log = structlog.get_logger()


class NoRendezvous(GrpoError):
    """The ranks of the hosts did not meet."""


class TooFewGpus(GrpoError):
    """A rank has no GPU of its own."""


def launch(options: ProcessOptions, device: str, words: Sequence[str]) -> int:
    """Run the present command with these words as each rank of this host. Returns its exit status:
    that of a rank that failed, or 128 + n after signal n. Args: device: the value of --device

    Raises:
        NoRendezvous: the other hosts did not come within `rank_deadline_s`.
        LostRank: ranks were lost more than `MAX_RESTARTS` times.
    """
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if 0 < gpus < options.ranks:
        raise TooFewGpus(f"--ranks {options.ranks}: this host has {gpus} GPUs; each rank needs one")
    os.environ.setdefault(THREADS, str(max(1, CPU.cores // options.ranks)))
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # a store for each start of the ranks
    os.environ[STARTED_BY] = str(os.getpid())
    while True:
        try:
            return _run_ranks(options, words)
        except RendezvousConnectionError as error:
            log.warning("rendezvous.lost", at=options.rendezvous, reason=str(error))
        except RendezvousError as error:
            raise NoRendezvous(
                f"the ranks of {options.nodes} hosts did not meet at {options.rendezvous} "
                f"({type(error).__name__}); start the same command on all hosts"
            ) from error
        except SignalException as stopped:
            return 128 + stopped.sigval


def _run_ranks(options: ProcessOptions, words: Sequence[str]) -> int:
    for number in STOP_SIGNALS:  # until the agent handles them: there are no ranks to end
        signal.signal(number, signal.SIG_DFL)
    with temporary_directory() as logs:
        spec = WorkerSpec(
            role="trainer",
            local_world_size=options.ranks,
            entrypoint=sys.executable,
            args=("-m", _module(), *words),
            rdzv_handler=_meeting(options),
            max_restarts=MAX_RESTARTS,
        )
        agent = Agent(spec, DefaultLogsSpecs(str(logs)), shutdown_timeout=SAVE_GRACE_S)
        try:
            result = agent.run()
        finally:
            is_signalled = isinstance(sys.exception(), SignalException | RendezvousConnectionError)
            if not is_signalled:  # the other hosts wait for this one, unless it ends for good
                spec.rdzv_handler.shutdown()
    if not result.is_failed():
        return 0
    if not (errors := _errors(result)):
        raise LostRank(
            f"ranks were lost {MAX_RESTARTS + 1} times; the lines above have the causes. Then "
            "start the trainer again, and it resumes"
        )
    return errors[0]


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec else "grpo_trainer"


def _errors(result: RunResult) -> list[int]:
    """The exit statuses of ranks that failed by themselves: neither lost nor ended by a signal nor
    because of another rank."""
    found = [failure.exitcode for failure in result.failures.values()]
    return [code for code in found if 0 < code <= 128 and code != EXIT_LOST]


class Agent(LocalElasticAgent):
    """torchrun's agent. It does not repeat an error that a restart cannot mend."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if _errors(result):
            self._remaining_restarts = 0
        elif result.is_failed() and self._remaining_restarts:
            log.warning("ranks.restarted", restarts_left=self._remaining_restarts - 1)
        return result


class Meeting(DynamicRendezvousHandler):
    """torchrun's rendezvous. Among its hosts, the one that holds the store is the first."""

    host: str
    is_first: bool

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        found = super().next_rendezvous()
        store = PrefixStore("hosts", found.store)
        store.set(str(found.rank), str(int(self.is_first)))
        count = found.world_size
        order = sorted(range(count), key=lambda rank: store.get(str(rank)) != b"1")
        rank = order.index(found.rank)
        address = RendezvousStoreInfo.build(rank, store, self.host)
        return RendezvousInfo(found.store, rank, count, address)


def _meeting(options: ProcessOptions) -> Meeting:
    """Wait until the store answers, and create it on its host."""
    host, port = _place(options.rendezvous) if options.nodes > 1 else (LOOPBACK, 0)
    deadline = Deadline(options.rank_deadline_s)
    while True:
        try:
            is_first = _can_listen(host, port)
            own = host if is_first else _address_towards(host, port)
            parameters = RendezvousParameters(
                backend="c10d",
                endpoint=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
                run_id=RUN,
                min_nodes=options.nodes,
                max_nodes=options.nodes,
                local_addr=own,
                is_host=is_first,
            )
            backend, store = create_backend(parameters)
            break
        except (RendezvousConnectionError, OSError) as error:
            if deadline.has_passed:
                raise NoRendezvous(
                    f"--rendezvous {options.rendezvous} did not answer within "
                    f"{options.rank_deadline_s:g} s (--rank-deadline-s): {error}; start the same "
                    "command on its host"
                ) from error
            time.sleep(RETRY_S)
    if options.nodes > 1:
        log.info("rendezvous.joined", at=options.rendezvous, holds_store=is_first)
        if interface := _interface_of(own):
            os.environ.setdefault(INTERFACE, interface)
    wait = timedelta(seconds=options.rank_deadline_s)
    meeting: Meeting = Meeting.from_backend(
        RUN, store, backend, options.nodes, options.nodes, own, RendezvousTimeout(join=wait)
    )
    meeting.host, meeting.is_first = host, is_first
    return meeting


def _place(rendezvous: str | None) -> tuple[str, int]:
    parts = urlsplit(f"//{rendezvous}")
    return parts.hostname or LOOPBACK, parts.port or 0


def _can_listen(host: str, port: int) -> bool:
    """Whether this host has the address, and no other process there listens.

    Raises:
        OSError: the name is not known (yet).
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                raise
            return False
    return True


def _address_towards(host: str, port: int) -> str:
    """This host's address on the way to another one. Nothing is sent.

    Raises:
        OSError: the other one does not listen (yet). A store that is connected to too early pauses
            for most of a minute.
    """
    with socket.create_connection((host, port), CONNECT_S) as reached:
        return str(reached.getsockname()[0])


def _interface_of(host: str) -> str | None:
    """gloo would take the address of the host's name, which may be that of the loopback."""
    addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    for name, found in psutil.net_if_addrs().items():
        if addresses & {one.address.partition("%")[0] for one in found}:
            return name
    return None
