"""Two network namespaces as two nodes, and a Slurm on them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.wait import wait_for

ADDRESSES = ("10.231.77.1", "10.231.77.2")
PROGRAMS = ("sbatch", "slurmctld", "slurmd", "munged")
DEADLINE_S = 1800.0


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def two_nodes() -> Iterator[tuple[str, str]]:
    """The names of two network namespaces that are connected. At the end, their processes end."""
    names = f"grpo-a-{os.getpid()}", f"grpo-b-{os.getpid()}"
    made: list[str] = []
    try:
        for name in names:
            try:
                _ip("netns", "add", name)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
            made.append(name)
        ends = [("veth", "netns", name) for name in names]
        _ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "veth")
            for device in ("lo", "veth"):
                _ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in made:
            end_all(name)
            _ip("netns", "delete", name)


def within(node: str, *words: str) -> list[str]:
    """A command line that runs another one on a node."""
    return ["nsenter", f"--net=/run/netns/{node}", *words]


def end_all(node: str) -> None:
    """Kill every process of a node."""
    found = subprocess.run(["ip", "netns", "pids", node], capture_output=True, text=True)
    for pid in map(int, found.stdout.split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


_CONFIG = """\
ClusterName=test
SlurmctldHost={host}({addresses[0]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.sock
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
MpiDefault=none
ReturnToService=2
MailProg=/bin/true
AccountingStorageType=accounting_storage/none
NodeName=n1 NodeHostname={host} NodeAddr={addresses[0]} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr={addresses[1]} CPUs=2 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def slurm_of(nodes: Sequence[str], directory: Path) -> Iterator[Path]:
    """Slurm on these nodes, n1 and n2 for it. Gives its configuration file, for SLURM_CONF; its
    commands run on the first node."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no Slurm: {', '.join(missing)}")
    host = socket.gethostname().partition(".")[0]
    for name in ("state", "spool-n1", "spool-n2"):
        (directory / name).mkdir(parents=True)
    config, key, munge = directory / "slurm.conf", directory / "munge.key", directory / "munge.sock"
    config.write_text(_CONFIG.format(host=host, addresses=ADDRESSES, directory=directory))
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    files = [f"--key-file={key}", f"--socket={munge}", f"--pid-file={directory}/munged.pid"]
    files += [f"--log-file={directory}/munged.log", f"--seed-file={directory}/seed"]
    environment = os.environ | {"SLURM_CONF": str(config)}
    daemons = [
        ["munged", "--foreground", "--force", *files],
        within(nodes[0], "slurmctld", "-D"),
        *(within(node, "slurmd", "-D", "-N", f"n{i}") for i, node in enumerate(nodes, 1)),
    ]
    started: list[subprocess.Popen[bytes]] = []

    def states() -> list[str]:
        found = subprocess.run(
            within(nodes[0], "sinfo", "-h", "-N", "-o", "%t"),
            env=environment,
            capture_output=True,
            text=True,
        )
        return found.stdout.split()

    try:
        for number, command in enumerate(daemons):
            with (directory / f"{number}.log").open("wb") as log:
                started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            if number == 0:
                wait_for(munge.exists)
        wait_for(states, lambda found: found == ["idle", "idle"])
        yield config
    finally:
        for daemon in reversed(started):
            daemon.terminate()
            daemon.wait()
