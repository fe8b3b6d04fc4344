"""The runner of `make gpu-visit`, with parts of which some fail, hang, or are interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.wait import wait_for

ROOT = Path(__file__).parents[2]
NEVER_S, FOREVER_S, SHORT_S = 1e6, 1000, 0.5
PROGRAM = """
import sys
from pathlib import Path
from benchmarks.gpu_visit import Part, Visit

directory = Path(sys.argv[1])
parts = [Part(name, float(limit_s), ["sh", "-c", command])
         for name, limit_s, command in zip(*[iter(sys.argv[2:])] * 3)]
Visit(parts, directory, "a host").run(lambda: 600.0)
"""


def started(directory: Path, parts: list[tuple[str, float, str]]) -> subprocess.Popen[bytes]:
    words = [str(word) for part in parts for word in part]
    command = [sys.executable, "-c", PROGRAM, str(directory / "visit"), *words]
    environment = {**os.environ, "HERE": str(directory)}
    return subprocess.Popen(command, cwd=ROOT, env=environment)


def outcomes(directory: Path) -> dict[str, str]:
    """State and detail, by part."""
    path = directory / "visit/outcomes.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    return {name: f"{outcome['state']}: {outcome['detail']}" for name, outcome in found.items()}


def noted(directory: Path) -> list[str]:
    """What the parts noted, in this order."""
    path = directory / "notes"
    return path.read_text().split() if path.exists() else []


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def note(word: str) -> str:
    return f"echo {word} >>$HERE/notes"


ELSEWHERE = f"setsid sleep {FOREVER_S} & {note('$!')}"
"""A server: in a session of its own."""


def test_a_visit_goes_on_after_parts_that_fail_and_hang_and_leaves_out_what_is_too_long(
    tmp_path: Path,
) -> None:
    visit = started(
        tmp_path,
        [
            ("raises", 60, "echo figures; echo broken >&2; exit 3"),
            ("hangs", SHORT_S, f"{ELSEWHERE}; echo working; sleep {FOREVER_S}"),
            ("too long", NEVER_S, "true"),
            ("last", 60, note("last")),
        ],
    )
    assert visit.wait(timeout=60) == 0
    found = outcomes(tmp_path)
    assert found.pop("last").startswith("done: ")
    assert found.pop("raises").endswith("figures / broken")
    assert found == {"hangs": f"failed: killed after {SHORT_S:g} s: working"}
    server, last = noted(tmp_path)
    assert last == "last"
    assert is_gone(int(server))
    table = (tmp_path / "visit/results.md").read_text()
    assert "| too long | 1e+06 s | left out (time)" in table
    assert "- raises, hangs, last: a host" in table


def test_a_visit_that_was_killed_goes_on_where_it_ended(tmp_path: Path) -> None:
    waits = f"test -e $HERE/again || {{ {ELSEWHERE}; exec sleep {FOREVER_S}; }}"
    parts = [
        ("fails", 60.0, f"{note('fails')}; test -e $HERE/again"),
        ("done", 60.0, note("done")),
        ("interrupted", 60.0, f"{waits}; {note('finished')}"),
        ("last", 60.0, note("last")),
    ]
    visit = started(tmp_path, parts)
    wait_for(lambda: len(noted(tmp_path)) == 3, deadline_s=60.0)
    visit.send_signal(signal.SIGKILL)
    visit.wait()
    server = int(noted(tmp_path)[2])
    assert [*outcomes(tmp_path)] == ["fails", "done"]
    assert not is_gone(server)

    (tmp_path / "again").touch()
    assert started(tmp_path, parts).wait(timeout=60) == 0
    assert is_gone(server)
    assert noted(tmp_path)[3:] == ["finished", "last", "fails"]
    assert {text.split(":")[0] for text in outcomes(tmp_path).values()} == {"done"}
