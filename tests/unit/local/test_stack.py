from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo_local import health
from grpo_local.health import HealthProbe
from grpo_local.ports import free_port
from grpo_local.processes import ManagedProcess, ProcessFailed
from grpo_local.services import url
from grpo_local.stack import Service, Stack
from grpo_local.stop_request import StopRequest, StopRequested
from tests.support.process_table import SLEEP, eventually, is_alive, unrelated_process

FAMILY = f"""
import pathlib, subprocess, sys, time
for new_session in (False, True):
    child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=new_session)
    with open(sys.argv[1], "a") as file:
        file.write(f"{{child.pid}}\\n")
time.sleep(120)
"""


WAIT_FOR_FILE = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
"""


def script(name: str, code: str, *arguments: str, **changes: object) -> Service:
    """A service that runs Python code and is healthy at once, unless `changes` says otherwise."""
    fields: dict[str, object] = {
        "name": name,
        "command": [sys.executable, "-c", code, *arguments],
        "healthy": lambda: True,
        "deadline_s": 60.0,
    }
    return Service(**(fields | changes))  # type: ignore[arg-type]


def file_exists(path: Path) -> Callable[[], bool]:
    return lambda: path.exists()


def seen_after(seconds: float, path: Path) -> Callable[[], bool]:
    def look() -> bool:
        time.sleep(seconds)
        return path.exists()

    return look


@pytest.fixture
def stop_request() -> Iterator[StopRequest]:
    with StopRequest() as request:
        yield request


@pytest.fixture
def stack(tmp_path: Path, stop_request: StopRequest) -> Iterator[Stack]:
    with Stack(tmp_path / "logs", stop_request) as stack:
        yield stack


def test_a_service_starts_once_the_one_before_it_is_healthy(stack: Stack, tmp_path: Path) -> None:
    events = tmp_path / "events"
    mark = (
        "import sys, time, pathlib\n"
        "def say(what):\n"
        "    with open(sys.argv[1], 'a') as file: file.write(f'{sys.argv[2]} {what}\\n')\n"
        "say('started'); time.sleep(0.3); say('ready')\n"
        "pathlib.Path(sys.argv[3]).touch(); time.sleep(120)\n"
    )
    for name in ("first", "second"):
        ready = tmp_path / f"{name}.ready"
        look = seen_after(0.1, ready)
        seconds = stack.start(script(name, mark, str(events), name, str(ready), healthy=look))
        assert 0.1 <= seconds < 60
    assert events.read_text().splitlines() == [
        "first started",
        "first ready",
        "second started",
        "second ready",
    ]


def test_health_over_http(stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PROBE_TIMEOUT_S", 30.0)  # a late answer counts as none
    (tmp_path / "health").write_text("ok")
    port = free_port()
    with HealthProbe() as probe:
        assert not probe.answers(url(port))
        server = Service(
            name="server",
            command=[
                *(sys.executable, "-m", "http.server", str(port)),
                *("--bind", "127.0.0.1", "--directory", str(tmp_path)),
            ],
            healthy=lambda: probe.answers(url(port)),
            deadline_s=60.0,
        )
        stack.start(server)
        assert probe.answers(url(port))
        assert not probe.has_environment(url(port), "gsm8k")  # 404
        (tmp_path / "environments").write_text("[]")
        assert not probe.has_environment(url(port), "gsm8k")
        (tmp_path / "environments").write_text('[{"name": "gsm8k_hard_0"}, {"name": "sums_1"}]')
        assert not probe.has_environment(url(port), "gsm8k")
        assert probe.has_environment(url(port), "gsm8k_hard")
        assert probe.has_environment(url(port), "sums")
        (tmp_path / "info").write_text('{"batch_size": -1, "max_token_len": -1}')
        assert not probe.trainer_is_registered(url(port))
        (tmp_path / "info").write_text('{"batch_size": 64, "max_token_len": 128}')
        assert probe.trainer_is_registered(url(port))
        (tmp_path / "info").write_text("half a fi")
        assert not probe.trainer_is_registered(url(port))


def test_death_while_starting_names_the_log_and_shows_its_end(stack: Stack) -> None:
    code = "print(*range(100), sep='\\n'); print('out of luck'); raise SystemExit(3)"
    with pytest.raises(ProcessFailed) as failure:
        stack.start(script("doomed", code, healthy=lambda: False))
    message = str(failure.value)
    assert message.startswith("doomed ended with status 3 while starting; see ")
    assert "logs/doomed.log" in message
    assert message.endswith("98\n99\nout of luck")


def test_a_deadline_that_passes_is_a_failure(stack: Stack) -> None:
    with pytest.raises(ProcessFailed, match=r"slow not healthy after 0\.2 s; see .*slow\.log"):
        stack.start(script("slow", SLEEP, healthy=lambda: False, deadline_s=0.2))


def test_death_of_an_earlier_service_ends_the_wait_for_a_later_one(
    stack: Stack, tmp_path: Path
) -> None:
    go_on = tmp_path / "go on"
    stack.start(script("early", f"{WAIT_FOR_FILE}print('bye')", str(go_on)))

    def not_yet() -> bool:
        go_on.touch()
        return False

    with pytest.raises(ProcessFailed, match=r"early ended with status 0; see .*\nbye"):
        stack.start(script("late", SLEEP, healthy=not_yet, deadline_s=60.0))


def test_death_by_a_signal_ends_a_sleep_and_is_named(stack: Stack) -> None:
    stack.start(script("victim", SLEEP))
    os.kill(stack.process("victim").pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(ProcessFailed, match="victim ended with SIGKILL"):
        stack.sleep(100)
    assert time.monotonic() - started < 50


def test_a_service_that_may_finish_fails_with_any_other_status(
    stack: Stack, tmp_path: Path
) -> None:
    go_on = tmp_path / "go on"
    code = f"{WAIT_FOR_FILE}raise SystemExit(2)"
    stack.start(script("bad", code, str(go_on), may_finish=True))
    stack.check()
    go_on.touch()
    stack.process("bad").wait(60)
    with pytest.raises(ProcessFailed, match="bad ended with status 2; see"):
        stack.check()


def test_a_service_that_may_finish_may_do_so_while_it_is_asked_how_it_is(stack: Stack) -> None:
    def not_yet() -> bool:
        stack.process("quick").wait(60)
        return False

    stack.start(script("quick", "pass", may_finish=True, healthy=not_yet))
    assert stack.process("quick").exit_code == 0
    stack.check()


def test_a_service_that_finished_badly_while_starting_is_named(stack: Stack) -> None:
    code = "raise SystemExit(2)"
    with pytest.raises(ProcessFailed, match="bad ended with status 2 while starting"):
        stack.start(script("bad", code, may_finish=True, healthy=lambda: False))


def test_a_job_is_waited_for_and_forgotten(stack: Stack, tmp_path: Path) -> None:
    made = tmp_path / "made"
    code = "import pathlib, sys, time; time.sleep(0.2); pathlib.Path(sys.argv[1]).touch()"
    assert stack.run(script("job", code, str(made), may_finish=True)) < 60
    assert made.exists()
    stack.check()


@pytest.mark.parametrize(
    ("code", "deadline_s", "message"),
    [
        ("raise SystemExit('no disk')", 60.0, r"job ended with status 1; see .*job\.log\nno disk"),
        (SLEEP, 0.5, r"job not finished after 0\.5 s; see .*job\.log"),
    ],
)
def test_a_job_that_fails_or_hangs(
    stack: Stack, code: str, deadline_s: float, message: str
) -> None:
    started = time.monotonic()
    with pytest.raises(ProcessFailed, match=message):
        stack.run(script("job", code, deadline_s=deadline_s, may_finish=True))
    assert time.monotonic() - started < 60  # the job that hangs sleeps for 120 s


def test_leaving_ends_every_descendant_and_no_stranger(
    tmp_path: Path, stop_request: StopRequest
) -> None:
    pid_file = tmp_path / "pids"

    def family_is_complete() -> bool:
        return pid_file.exists() and pid_file.read_text().count("\n") == 2

    with unrelated_process() as bystander:
        with Stack(tmp_path / "logs", stop_request) as stack:
            stack.start(script("family", FAMILY, str(pid_file), healthy=family_is_complete))
            started = [stack.process("family").pid, *map(int, pid_file.read_text().split())]
            assert all(is_alive(pid) for pid in started)
        assert not any(is_alive(pid) for pid in started)
        assert is_alive(bystander.pid)


def test_services_end_in_reverse_order(tmp_path: Path, stop_request: StopRequest) -> None:
    order = tmp_path / "order"
    code = (
        "import pathlib, signal, sys, time\n"
        "def end(*_):\n"
        "    with open(sys.argv[1], 'a') as file: file.write(sys.argv[2])\n"
        "    raise SystemExit\n"
        "signal.signal(signal.SIGTERM, end); pathlib.Path(sys.argv[3]).touch(); time.sleep(120)\n"
    )
    with Stack(tmp_path / "logs", stop_request, grace_s=60.0) as stack:
        for name in "abc":
            ready = tmp_path / name
            stack.start(
                script(name, code, str(order), name, str(ready), healthy=file_exists(ready))
            )
    assert order.read_text() == "cba"


def test_a_stop_signal_ends_a_wait_and_a_second_one_the_patience(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    stubborn = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path(sys.argv[1]).touch(); time.sleep(120)\n"
    )
    interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    with StopRequest() as request, Stack(tmp_path / "logs", request, grace_s=60.0) as stack:
        stack.start(script("stubborn", stubborn, str(ready), healthy=file_exists(ready)))
        interrupt.start()
        with pytest.raises(StopRequested, match="SIGINT") as stopped:
            stack.sleep(30)
        assert stopped.value.exit_status == 130
        started = time.monotonic()
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        stack.stop()
        assert 0.2 < time.monotonic() - started < 30


def test_handlers_come_back() -> None:
    former = signal.getsignal(signal.SIGTERM)
    with StopRequest():
        assert signal.getsignal(signal.SIGTERM) is not former
    assert signal.getsignal(signal.SIGTERM) is former


def test_a_run_under_nohup_survives_the_end_of_its_terminal() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not eventually(lambda: bool(request.received), deadline_s=0.1)
    finally:
        signal.signal(signal.SIGHUP, former)


def test_the_reason_leads_over_what_an_interpreter_prints_on_its_way_out(tmp_path: Path) -> None:
    script = 'printf "start\\nERROR disk full\\n[error    ] EngineDied\\n"; seq 1 100; exit 3'
    process = ManagedProcess("noisy", ["sh", "-c", script], tmp_path / "noisy.log")
    assert process.wait(60.0) == 3
    process.kill()
    assert process.log_tail().splitlines() == ["ERROR disk full", "[error    ] EngineDied"]


def test_a_log_without_errors_shows_its_end(tmp_path: Path) -> None:
    process = ManagedProcess("plain", ["seq", "1", "100"], tmp_path / "plain.log")
    assert process.wait(60.0) == 0
    process.kill()
    assert process.log_tail(lines=2).splitlines() == ["99", "100"]
