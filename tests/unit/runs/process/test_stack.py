"""Processes of a run: ports, start, health, failures and stop."""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from grpo_core.process import ManagedProcess, ProcessFailed
from grpo_runs.process import health, ports
from grpo_runs.process.health import HealthProbe
from grpo_runs.process.ports import free_port
from grpo_runs.process.stack import (
    Service,
    Stack,
    StopRequest,
    StopRequested,
    start_on_screen,
)
from grpo_runs.settings.views import url
from tests.support.process_table import SLEEP, is_alive, unrelated_process
from tests.unit.runs.stand_ins import FOREVER_S, Shown, script

FAMILY = f"""
import pathlib, subprocess, sys, time
for new_session in (False, True):
    child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=new_session)
    with open(sys.argv[1], "a") as file:
        file.write(f"{{child.pid}}\\n")
time.sleep(600)
"""


@pytest.fixture
def stop_request() -> Iterator[StopRequest]:
    with StopRequest() as request:
        yield request


@pytest.fixture
def stack(tmp_path: Path, stop_request: StopRequest) -> Iterator[Stack]:
    with Stack(tmp_path / "logs", stop_request) as stack:
        yield stack


def test_services_start_side_by_side_and_are_ready_in_the_order_given(stack: Stack) -> None:
    answers, ready = iter([False, False, True]), []

    def first_is_healthy() -> bool:
        return is_alive(stack.process("second").pid) and next(answers)

    services = [script("first", SLEEP, healthy=first_is_healthy), script("second", SLEEP)]
    stack.start(services, lambda service, _seconds: ready.append(service.name))
    assert next(answers, None) is None, "it was asked until it was healthy"
    assert ready == ["first", "second"]


def test_a_start_tells_the_first_service_that_is_not_ready_and_what_it_does(stack: Stack) -> None:
    class Waits(Shown):
        @contextlib.contextmanager
        def waiting(self, waited_for: Callable[[], str]) -> Iterator[None]:
            self.waited_for = waited_for
            yield

    screen, told = Waits(), []

    def has_logged() -> bool:
        told.append(screen.waited_for())
        return told[-1].endswith("; it logged last: loading")

    code = f"print('loading', flush=True); {SLEEP}"
    services = [script(name, code, healthy=has_logged) for name in ("redis", "run-api")]
    start_on_screen(stack, services, screen)
    named = [text.partition(" ")[0] for text in told]
    assert list(dict.fromkeys(named)) == ["redis", "run-api"]


def test_a_service_is_started_once_the_services_it_needs_accept_connections(stack: Stack) -> None:
    answers = iter([False, False, True])
    stack.start([script("first", SLEEP), script("second", SLEEP, may_start=lambda: next(answers))])
    assert next(answers, None) is None
    assert is_alive(stack.process("second").pid)


def test_health_over_http(stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PROBE_TIMEOUT_S", 60.0)  # a late answer would count as no answer
    base = url(free_port())
    environments = '[{"name": "gsm8k_hard_0"}, {"name": "sums_1"}]'
    with HealthProbe() as probe:
        assert not probe.answers(base)
        (tmp_path / "health").write_text("ok")
        server = [*(sys.executable, "-m", "http.server", base.rpartition(":")[2])]
        options = ["--bind", "127.0.0.1", "--directory", str(tmp_path)]
        command = [*server, *options]
        stack.start([Service("server", command, lambda: probe.answers(base), FOREVER_S)])
        assert not probe.has_environment(base, "gsm8k_hard")  # 404
        for content, registered in (("[]", False), (environments, True)):
            (tmp_path / "environments").write_text(content)
            assert probe.has_environment(base, "gsm8k_hard") == registered
            assert not probe.has_environment(base, "gsm8k")
        for batch_size, registered in (("-1", False), ("64", True), ("half a fi", False)):
            (tmp_path / "info").write_text(f'{{"batch_size": {batch_size}}}')
            assert probe.trainer_is_registered(base) == registered


DIES = "print(*range(100), sep='\\n'); print('out of luck'); raise SystemExit(3)"


@pytest.mark.parametrize(
    ("doomed", "told"),
    [
        (
            script("it", DIES, healthy=lambda: False),
            r"it ended with status 3 while starting; see .*it\.log\n(.*\n)*98\n99\nout of luck$",
        ),
        (
            script("it", SLEEP, healthy=lambda: False, deadline_s=0.2, deadline_option="--it-s"),
            r"not healthy after 0\.2 s; if it only needs more time, raise --it-s; see .*\n\(noth",
        ),
        (
            script("it", SLEEP, may_start=lambda: False, deadline_s=0.1),
            r"it was not started, because other services .* within 0\.1 s",
        ),
    ],
    ids=["ends", "slow", "may not start"],
)
def test_a_service_that_does_not_start_is_named_with_its_log(
    doomed: Service, told: str, stack: Stack
) -> None:
    with pytest.raises(ProcessFailed, match=told):
        stack.start([script("first", SLEEP), doomed])


def test_the_death_of_an_earlier_service_ends_the_wait_for_a_later_one(
    stack: Stack, tmp_path: Path
) -> None:
    waits = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
    stack.start([script("early", f"{waits}print('bye')", tmp_path / "go on")])

    def not_yet() -> bool:
        (tmp_path / "go on").touch()
        return False

    with pytest.raises(ProcessFailed, match=r"early ended with status 0; see .*\nbye"):
        stack.start([script("late", SLEEP, healthy=not_yet)])


ENDS_ONCE_TOLD = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
sys.exit(2)
"""


def test_a_service_that_may_finish_does_so_with_status_0_only(stack: Stack, tmp_path: Path) -> None:
    def not_healthy_when_it_has_ended() -> bool:
        stack.process("good").wait(FOREVER_S)
        return False

    stack.start([script("good", "", may_finish=True, healthy=not_healthy_when_it_has_ended)])
    stack.check()
    stack.start([script("bad", ENDS_ONCE_TOLD, tmp_path / "told", may_finish=True)])
    (tmp_path / "told").touch()
    stack.process("bad").wait(FOREVER_S)
    with pytest.raises(ProcessFailed, match="bad ended with status 2; see"):
        stack.check()


def test_one_of_a_group_may_end_but_not_the_last(stack: Stack) -> None:
    stack.start([script(name, SLEEP, group="server") for name in ("first", "second")])
    stack.process("first").signal(signal.SIGKILL)
    stack.process("first").wait(FOREVER_S)
    stack.check()
    assert stack.lost() == {"first": "SIGKILL"}
    stack.process("second").signal(signal.SIGKILL)
    stack.process("second").wait(FOREVER_S)
    assert stack.lost() == {}  # the run has failed
    with pytest.raises(ProcessFailed, match=r"first ended with SIGKILL.*\nsecond ended"):
        stack.check()


def test_a_job_is_waited_for_until_it_has_ended(stack: Stack, tmp_path: Path) -> None:
    made, code = tmp_path / "made", "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()"
    stack.start([script("job", code, made, healthy=lambda: False, may_finish=True)])
    assert made.exists()
    stack.check()


def test_leaving_ends_every_descendant_and_no_stranger(
    tmp_path: Path, stop_request: StopRequest
) -> None:
    pid_file = tmp_path / "pids"

    def family_is_complete() -> bool:
        return pid_file.exists() and pid_file.read_text().count("\n") == 2

    with unrelated_process() as bystander:
        with Stack(tmp_path / "logs", stop_request) as stack:
            stack.start([script("family", FAMILY, pid_file, healthy=family_is_complete)])
            started = [stack.process("family").pid, *map(int, pid_file.read_text().split())]
            assert all(is_alive(pid) for pid in started)
        assert not any(is_alive(pid) for pid in started)
        assert is_alive(bystander.pid)


LEAVES_AN_ORPHAN = """
import os, pathlib, sys, time
if not os.fork():
    parent = os.getpid()
    if not os.fork():
        os.setsid()
        while os.getppid() == parent:
            time.sleep(0.01)
        pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()}\\n")
        while not os.path.exists(sys.argv[2]):
            time.sleep(0.01)
    os._exit(0)
time.sleep(600)
"""


def test_orphans_that_have_ended_are_reaped_and_no_own_child(stack: Stack, tmp_path: Path) -> None:
    told, go = tmp_path / "told", tmp_path / "go"

    def orphan() -> int:
        return int(told.read_text() or 0) if told.exists() else 0

    leaves = script("leaves", LEAVES_AN_ORPHAN, told, go, healthy=lambda: orphan() > 0, group="it")
    stack.start([leaves, script("ends", ENDS_ONCE_TOLD, go, group="it")])
    own = subprocess.Popen([sys.executable, "-c", "raise SystemExit(4)"])
    go.touch()
    for pid in (orphan(), own.pid, stack.process("ends").pid):
        while is_alive(pid):
            time.sleep(0.01)
    stack.check()
    assert not psutil.pid_exists(orphan()), "a zombie exists"
    assert (own.wait(), stack.lost()) == (4, {"ends": "status 2"})


def on_sigterm(action: str) -> str:
    """Code of a process that handles SIGTERM, and creates the file of its first argument."""
    return (
        "import os, pathlib, signal, sys, time\n"
        f"def end(*_): {action}\n"
        "signal.signal(signal.SIGTERM, end); pathlib.Path(sys.argv[1]).touch(); time.sleep(600)\n"
    )


def test_services_end_in_reverse_order(tmp_path: Path, stop_request: StopRequest) -> None:
    order = tmp_path / "order"
    code = on_sigterm("open(sys.argv[2], 'a').write(sys.argv[3]); sys.exit()")
    with Stack(tmp_path / "logs", stop_request, grace_s=FOREVER_S) as stack:
        for name in "abc":
            ready = tmp_path / name
            stack.start([script(name, code, ready, order, name, healthy=ready.exists)])
    assert order.read_text() == "cba"


def test_a_stop_signal_ends_a_wait_and_a_second_one_the_patience(tmp_path: Path) -> None:
    ready = tmp_path / "ready"

    def interrupt_once_it_is_ready(_pids: Mapping[str, int]) -> None:
        if ready.exists() and not request.received:
            os.kill(os.getpid(), signal.SIGINT)

    stubborn = on_sigterm("os.kill(os.getppid(), signal.SIGINT)")
    with (
        StopRequest() as request,
        Stack(tmp_path / "logs", request, interrupt_once_it_is_ready, FOREVER_S) as stack,
    ):
        with pytest.raises(StopRequested, match="SIGINT") as stopped:
            stack.start([script("stubborn", stubborn, ready, healthy=lambda: False)])
        assert stopped.value.exit_status == 130
        process = stack.process("stubborn")
        stack.stop()
        assert request.received == [signal.SIGINT] * 2
        assert process.exit_code == -signal.SIGKILL


def test_the_end_of_a_log_begins_with_its_errors(tmp_path: Path) -> None:
    """Other lines after them, as an interpreter prints at exit, are left out."""
    lines = ("[--log-level {ERROR,INFO}]", "ERROR disk full", "[error    ] E", "x: error: no -y")
    prints = f"printf '%s\\n' {shlex.join(lines)}; seq 1 100; exit 3"
    process = ManagedProcess("it", ["sh", "-c", prints], tmp_path / "it.log")
    assert process.wait(FOREVER_S) == 3
    process.kill()
    assert process.log_tail().splitlines() == [*lines[1:]]


def test_the_end_of_a_log_without_marked_errors_is_not_its_progress(tmp_path: Path) -> None:
    progress = (
        "INFO:     started",
        "(Engine pid=1) INFO 11-29 12:03:34 b",
        "",
        "x [info   ] y",
    )
    lines = ("Traceback (most recent call last):", *progress, "OSError: disk full", *progress)
    process = ManagedProcess("it", ["printf", r"%s\n", *lines], tmp_path / "it.log")
    assert process.wait(FOREVER_S) == 0
    process.kill()
    assert process.log_tail().splitlines() == [lines[0], "OSError: disk full", progress[-1]]


ELSEWHERE = """
import sys
from pathlib import Path
from grpo_runs.process import ports
ports._GIVEN_TO_CLIENTS, ports._LOWEST = Path(sys.argv[1]), int(sys.argv[2])
print(ports.free_port())
"""


def test_a_free_port_is_given_once_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even while nobody listens on it. The single port below those that the kernel gives to
    clients is one that nothing else asks for: tests that run beside this one take theirs from
    20000 on."""
    told = tmp_path / "range"
    monkeypatch.setattr(ports, "_GIVEN_TO_CLIENTS", told)
    with socket.socket() as server:
        while server.getsockname()[1] == 0:
            with contextlib.suppress(OSError):
                server.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, 20_000)))
        port = server.getsockname()[1]
        monkeypatch.setattr(ports, "_LOWEST", port)
        told.write_text(f"{port + 1}\t60999\n")
        assert free_port() != port, "somebody listens"
    assert free_port() == port
    assert free_port() != port
    command = [sys.executable, "-c", ELSEWHERE, str(told), str(port)]
    assert int(subprocess.check_output(command)) != port
