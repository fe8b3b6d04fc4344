"""Programs that attack what runs them, and what must come of it: the same in every sandbox.

Each attack runs its program and asserts that it achieved nothing. On a machine without a sandbox
they do harm: `kill_parent` ends every process of the user.
"""

from __future__ import annotations

import os
import signal
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_env.sandbox import Ended, Limits
from tests.support.wait import wait_for

Run = Callable[..., Ended]
"""`run(code, directory=, limits=)` runs a Python program."""
Attack = Callable[[Run, Path], None]
"""With an empty directory of the test."""

MIB = 2**20
_FOR_EVER = "time.sleep(10_000)"


def fork_bomb(run: Run, directory: Path) -> None:
    """Also beside the process that serves its service."""
    code = f"""
import os, time
started = 0
try:
    while True:
        if os.fork() == 0:
            {_FOR_EVER}
        started += 1
except OSError:
    print(started)
"""
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(directory / "service"))
        for service in (None, directory / "service"):
            limits = Limits(seconds=60, processes=20)
            ended = leaving_nothing(run, code, service=service, limits=limits)
            assert ended.ok, ended
            assert 5 < int(ended.output) < 20


def daemon(run: Run, _directory: Path) -> None:
    code = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(3):
            os.close(number)
        {_FOR_EVER}
    os._exit(0)
os.wait()
print("left a daemon")
"""
    ended = leaving_nothing(run, code, limits=Limits(seconds=60))
    assert (ended.output, ended.reason) == ("left a daemon\n", "finished")


def never_ending(run: Run, _directory: Path) -> None:
    code = f"import time, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {_FOR_EVER}"
    assert leaving_nothing(run, code, limits=Limits(seconds=0.5)).reason == "timeout"


def busy(run: Run, _directory: Path) -> None:
    code = "while True: pass"
    assert leaving_nothing(run, code, limits=Limits(seconds=60, cpu_s=1)).reason == "cpu"


def endless_output(run: Run, _directory: Path) -> None:
    ended = leaving_nothing(run, "while True: print('x' * 1000)", limits=Limits(seconds=60))
    assert ended.reason == "output"
    assert len(ended.output) <= Limits().output_bytes


def memory(run: Run, _directory: Path) -> None:
    """Memory of one process, and memory that two share."""
    limits = Limits(seconds=60, memory_bytes=100 * MIB)
    own = run("held = []\nwhile True: held.append(bytearray(10**6))", limits=limits)
    assert not own.ok
    assert own.reason == "memory" or "MemoryError" in own.errors, own
    code = """
import mmap, os
os.fork()
held = []
while True:
    held.append(mmap.mmap(-1, 10**6))
    held[-1].write(b"x" * 10**6)
"""
    assert leaving_nothing(run, code, limits=limits).reason == "memory"


def hidden_memory(run: Run, _directory: Path) -> None:
    """Memory that belongs to no process: files without a name, and file systems of its own."""
    code = """
import os, subprocess
try:
    for number in range(200):
        os.write(os.memfd_create("x"), b"x" * 2**20)
    print("200 files")
except OSError:
    pass
command = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "x", "/tmp"]
print(subprocess.run(command, capture_output=True).returncode)
"""
    ended = run(code, limits=Limits(seconds=60, memory_bytes=100 * MIB))
    assert ended.reason == "memory" or ended.output == "1\n", ended


def many_files(run: Run, _directory: Path) -> None:
    """Files without content, each of which takes a kilobyte of the kernel's memory, beside a
    process that has ended."""
    code = """
import os
if os.fork() == 0:
    os._exit(0)
number = 0
while True:
    open(f"/tmp/{number}", "w").close()
    number += 1
"""
    ended = run(code, limits=Limits(seconds=60, memory_bytes=16 * MIB))
    assert ended.reason == "memory", ended


def disk(run: Run, _directory: Path) -> None:
    """Write wherever a file can be made, without end."""
    code = """
import os
filled = 0
places = ["/", "/dev", "/dev/shm", "/etc", "/proc", "/run", "/tmp", "/usr/bin", "/var/tmp"]
for place in places:
    for number in range(100):
        try:
            with open(f"{place}/{number}", "wb", buffering=0) as file:
                while (written := file.write(b"x" * 2**16)) > 0:
                    filled += written
        except OSError:
            pass
print(filled)
"""
    ended = run(code, limits=Limits(seconds=60, file_bytes=4 * MIB))
    assert ended.ok, ended
    assert 4 * MIB <= int(ended.output) <= 8 * MIB


def disk_of_directory(run: Run, directory: Path) -> None:
    """Fill the working directory, also where its files cannot be found or take no space."""
    places = {
        "open": "",
        "deep": "for _ in range(20): os.mkdir('d' * 250); os.chdir('d' * 250)",
        "closed": "os.mkdir('d', 0o300); os.chdir('d')",
        "empty": "[os.mkdir(str(number)) for number in range(100_000)]",
    }
    for name, place in places.items():
        code = f"""
import os, time
{place}
for number in range(30):
    open(str(number), "wb").write(b"x" * 2**20)
{_FOR_EVER}
"""
        work = directory / name
        work.mkdir()
        limits = Limits(seconds=60, file_bytes=4 * MIB)
        ended = leaving_nothing(run, code, directory=work, limits=limits)
        assert ended.reason == "files", (name, ended)
    (directory / "closed" / "d").chmod(0o700)  # for its removal


def secrets(run: Run, directory: Path) -> None:
    """Files of the host, and variables of the process that runs the sandbox."""
    secret = uuid.uuid4().hex
    (directory / "secret.txt").write_text(secret)
    os.environ["HF_TOKEN"] = secret
    own = os.readlink("/proc/self/ns/pid")
    code = f"""
import glob, os
places = ["/etc/shadow", {str(directory)!r} + "/secret.txt", os.path.expanduser("~root/.ssh")]
places += glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/root/etc/shadow")
for place in places:
    try:
        found = open(place, "rb").read()
        if {secret[:16]!r}.encode() + {secret[16:]!r}.encode() in found or "shadow" in place:
            print("read", place)
    except OSError:
        pass
if os.path.exists("/proc/self") and os.readlink("/proc/self/ns/pid") == {own!r}:
    print("sees the processes of the host")
print("HF_TOKEN" in os.environ)
"""
    try:
        ended = run(code, limits=Limits(seconds=60))
    finally:
        del os.environ["HF_TOKEN"]
    assert ended.output == "False\n", ended


def network(run: Run, _directory: Path) -> None:
    """Redis on loopback, the address of a cloud's credentials, and any other."""
    with _listening() as (port, name):
        code = f"""
import socket
for family, address in [
    (socket.AF_INET, ("127.0.0.1", {port})),
    (socket.AF_INET, ("169.254.169.254", 80)),
    (socket.AF_INET, ("1.1.1.1", 53)),
    (socket.AF_INET6, ("::1", {port})),
    (socket.AF_UNIX, {name!r}),
]:
    try:
        socket.socket(family).connect(address)
        print("connected to", address)
    except OSError:
        pass
try:
    socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("1.1.1.1", 53))
    print("sent")
except OSError:
    print("nothing")
"""
        ended = run(code, limits=Limits(seconds=60))
    assert ended.output == "nothing\n", ended


def kill_parent(run: Run, _directory: Path) -> None:
    of_host = [number for number in (os.getpid(), os.getppid()) if number > 1]
    code = f"""
import os, signal
for number in [os.getppid(), *{of_host}, 1, -1]:
    try:
        os.kill(number, signal.SIGKILL)
    except OSError:
        pass
print("still here")
"""
    ended = run(code, limits=Limits(seconds=60))
    # In Docker, a program that kills its parent ends its own container, at once or a little later.
    is_its_container = ended.reason == "finished" and ended.status == 128 + signal.SIGKILL
    assert is_its_container or ended.output == "still here\n", ended


def links(run: Run, directory: Path) -> None:
    """A link to a file of the host in the directory gives the program no right to that file."""
    work, secret = directory / "linked", directory / "of_the_host.txt"
    work.mkdir()
    secret.write_text("secret")
    owner = secret.stat().st_uid
    (work / "link").symlink_to(secret)
    ended = run("print(open('link').read())", directory=work, limits=Limits(seconds=60))
    assert ended.errors.endswith("No such file or directory: 'link'\n")
    assert secret.stat().st_uid == owner


ATTACKS: tuple[Attack, ...] = (
    fork_bomb,
    daemon,
    never_ending,
    busy,
    endless_output,
    memory,
    hidden_memory,
    many_files,
    disk,
    disk_of_directory,
    secrets,
    network,
    kill_parent,
    links,
)


def leaving_nothing(run: Run, code: str, **options: object) -> Ended:
    """Run a program, and wait until no process of it is left: the kernel may be ending one."""
    mark = uuid.uuid4().hex
    ended = run(f"mark = '{mark}'\n{code}", **options)

    def left() -> list[Path]:
        lines = [path / "cmdline" for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [line for line in lines if mark in _text(line)]

    wait_for(left, lambda lines: not lines)
    return ended


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:  # it has ended
        return ""


@contextmanager
def _listening() -> Iterator[tuple[int, str]]:
    """A port of loopback, and a socket without a file."""
    name = f"\0{uuid.uuid4().hex}"
    with socket.create_server(("127.0.0.1", 0)) as port, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(name)
        unix.listen()
        yield port.getsockname()[1], name
