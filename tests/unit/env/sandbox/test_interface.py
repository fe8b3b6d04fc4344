"""A program gets its input, variables, files and service, and its end is told as it was."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer

import pytest

from grpo_core.process import children
from grpo_env.sandbox import (
    SERVICE_URL,
    Ended,
    Limits,
    Sandbox,
    SandboxFailed,
    SandboxUnusable,
    run_python,
    run_shell,
    sandbox_of,
)
from grpo_env.sandbox.bubblewrap import usable_bubblewrap
from tests.support.wait import wait_for_async

Python = Callable[..., Ended]


class _Hello(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"hello from {self.path}".encode())

    def log_message(self, *_: object) -> None:
        pass

    def address_string(self) -> str:
        return "a program"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "service.sock"
    with ThreadingUnixStreamServer(str(path), _Hello) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        yield path
        server.shutdown()


@pytest.fixture(params=["bubblewrap", "none"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    if request.param == "bubblewrap":
        found: Sandbox = request.getfixturevalue("bubblewrap")
        return found
    return sandbox_of("none")


def test_a_program_gets_what_run_names(sandbox: Sandbox, service: Path, tmp_path: Path) -> None:
    directory, readable = tmp_path / "work", tmp_path / "question.txt"
    directory.mkdir()
    readable.write_text("why?")
    code = f"""
import os, sys, urllib.request
answer = urllib.request.urlopen(os.environ["BASE_URL"] + "/models").read().decode()
open("answer.txt", "w").write(answer)
print(open({str(readable)!r}).read(), sys.stdin.read(), os.getcwd())
sys.exit(3)
"""
    ended = asyncio.run(
        sandbox.run(
            [sandbox.python, "-c", code],
            stdin=b"because",
            environment={"BASE_URL": f"{SERVICE_URL}/v1"},
            directory=directory,
            readable=[readable],
            service=service,
        )
    )
    assert (ended.output, ended.errors) == (f"why? because {directory}\n", "")
    assert (ended.status, ended.reason, ended.ok) == (3, "finished", False)
    assert (directory / "answer.txt").read_text() == "hello from /v1/models"


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ("print('fine')", 0, "finished"),
        ("import os; os.kill(os.getpid(), 11)", 139, "finished"),
        ("import time; time.sleep(1000)", 137, "timeout"),
        ("while True: print('again')", 137, "output"),
    ],
)
def test_how_it_ended(sandbox: Sandbox, code: str, status: int, reason: str) -> None:
    limits = Limits(seconds=0.3 if reason == "timeout" else 60.0)
    ended = asyncio.run(sandbox.run([sandbox.python, "-c", code], limits=limits))
    assert (ended.status, ended.reason) == (status, reason), ended.errors
    assert len(ended.output) <= limits.output_bytes


def test_a_program_ends_with_the_process_that_runs_it(sandbox: Sandbox, tmp_path: Path) -> None:
    """As a process of rewards at its deadline."""
    os.mkfifo(tmp_path / "alive")
    code = """
import time
with open("alive", "w") as file:
    print("yes", file=file, flush=True)
    time.sleep(20)
    print("still", file=file)
"""
    runner = f"""
import asyncio, pathlib
from grpo_env.sandbox import sandbox_of
sandbox = sandbox_of({sandbox.kind!r})
directory = pathlib.Path({str(tmp_path)!r})
asyncio.run(sandbox.run([sandbox.python, "-c", {code!r}], directory=directory))
"""
    running = subprocess.Popen([sys.executable, "-c", runner])
    with running, (tmp_path / "alive").open() as alive:
        assert alive.readline() == "yes\n"
        running.kill()
        assert alive.read() == ""


def test_a_sandbox_that_does_not_start_is_told_from_a_program_that_fails(
    bubblewrap: Sandbox, service: Path
) -> None:
    running = bubblewrap.run(["true"], readable=[Path("/")], service=service)
    with pytest.raises(SandboxFailed, match=r"bwrap: Can't create file at /run/service\.sock"):
        asyncio.run(running)
    with pytest.raises(SandboxFailed, match="did not run a program: timeout"):
        asyncio.run(bubblewrap.run(["true"], limits=Limits(seconds=0)))


async def test_a_sandbox_that_is_killed_is_told_from_a_program_that_is(
    bubblewrap: Sandbox, tmp_path: Path
) -> None:
    """As the kernel does when memory runs out."""
    before, started = children(), tmp_path / "started"
    code = f"open({str(started)!r}, 'w').close(); import time; time.sleep(1000)"
    running = bubblewrap.run([bubblewrap.python, "-c", code], directory=tmp_path)
    task = asyncio.create_task(running)
    await wait_for_async(started.exists)
    (bwrap,) = children() - before
    os.kill(bwrap, signal.SIGKILL)
    with pytest.raises(SandboxFailed, match="did not run a program: finished, status 137"):
        await task


def test_a_machine_without_memory_is_told_from_a_program_that_fails() -> None:
    """The kernel ends both programs, of which one ended itself."""
    cgroup = Path("/sys/fs/cgroup/memory") / f"sandbox-{os.getpid()}"
    try:
        cgroup.mkdir()
        (cgroup / "memory.limit_in_bytes").write_text(str(2**25))
    except OSError as error:
        pytest.skip(f"no memory cgroup of its own: {error}")
    run = sandbox_of("none").run
    kill = "kill -9 $$"
    try:
        assert asyncio.run(run(["sh", "-c", kill])).status == 137
        fill = f"echo $$ >{cgroup}/cgroup.procs; exec head -c {2**26} /dev/zero | tail >/dev/null"
        with pytest.raises(SandboxFailed, match="ran out of memory"):
            asyncio.run(run(["bash", "-o", "pipefail", "-c", fill]))
    finally:
        cgroup.rmdir()


def test_bwrap_is_found_on_path_or_named_as_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnusable, match="apt-get install bubblewrap"):
        usable_bubblewrap()
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho that of PATH >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    with pytest.raises(SandboxUnusable, match="cannot make namespaces here: that of PATH"):
        usable_bubblewrap()


def test_all_processes_inside_have_the_limits(python: Python, service: Path) -> None:
    """Also the two that serve the program, which it could make do its work."""
    code = """
import glob
for path in glob.glob("/proc/[0-9]*/limits"):
    print(next(line.split()[2:4] for line in open(path) if line.startswith("Max processes")))
"""
    ended = python(code, service=service, limits=Limits(processes=20))
    assert ended.ok
    assert {*ended.output.splitlines()} <= {"['20', '20']"}


def test_a_program_that_is_not_there_is_no_failure_of_the_sandbox(bubblewrap: Sandbox) -> None:
    assert asyncio.run(bubblewrap.run(["no-such-program"])).status == 127


def test_the_model_reads_the_end_of_the_output(python: Python) -> None:
    ended = python("print('1234567'); raise SystemExit('no')")
    assert ended.for_model() == "1234567\nno\n(exit status 1)"
    assert ended.for_model(4) == ("(the first 6 characters are left out)\n7\nno\n(exit status 1)")


@pytest.fixture
def chosen(bubblewrap: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_SANDBOX", bubblewrap.kind)


@pytest.mark.usefixtures("chosen")
def test_rewards_may_call_it_with_and_without_an_event_loop() -> None:
    async def in_a_loop() -> Ended:
        return run_python("print(6 * 7)")

    assert run_python("print(6 * 7)").output == asyncio.run(in_a_loop()).output == "42\n"


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("text", ["print('\0')", "print('\ud800'", "\x01\ufffe"])
def test_a_model_may_write_any_text(text: str) -> None:
    assert not run_python(text).ok
    assert run_shell(text).status != 0


@pytest.mark.usefixtures("chosen")
def test_a_program_may_be_long_and_gets_all_of_its_input() -> None:
    code = "import os, sys\nprint(os.read(0, 3), input(), sys.argv)\n" + "# long\n" * 50_000
    assert run_python(code, stdin="abcdef").output == "b'abc' def ['-c']\n"
    assert run_shell("cat; exit 3", stdin="abc").for_model() == "abc\n(exit status 3)"
    assert run_shell("#" * 200_000).status == 126
