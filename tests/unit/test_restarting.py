"""`containers/restarting.sh` around a command that fails, as in the trainer's container."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.wait import DEADLINE_S, wait_for

SCRIPT = Path(__file__).parents[2] / "containers" / "restarting.sh"
LIMIT = 2
ENVIRONMENT = os.environ | {"RUN_ID": "run"}
TRAINER = """
echo start >> starts
n=$(wc -l < starts)
case " $1 " in *" $n "*) mkdir -p saves/run/trainer_state/$n ;; esac
[ "$n" -lt "$2" ] || exit 0
[ "$3" != kill ] || kill -KILL $$
exit 7
"""
"""Arguments: starts that save a state, the start that ends well, and how the others end."""


def command(directory: Path, *trainer: str) -> list[str]:
    return [
        *("bash", str(SCRIPT), "trainer", str(LIMIT), "saves", str(directory / "given_up")),
        *("bash", "-c", *trainer),
    ]


def ended(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    trainer = (TRAINER, "trainer", *arguments)
    return subprocess.run(
        command(directory, *trainer),
        cwd=directory,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )


def starts(directory: Path) -> int:
    return len((directory / "starts").read_text().splitlines())


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_it_is_started_again_as_long_as_states_are_saved_between_failures(
    tmp_path: Path, how: str
) -> None:
    done = ended(tmp_path, "1 3 5", "6", how)
    assert (done.returncode, starts(tmp_path)) == (0, 6), done.stderr


@pytest.mark.parametrize(("saving", "number"), [("", 3), ("2", 4)])
def test_without_a_new_state_it_is_given_up_with_its_status(
    tmp_path: Path, saving: str, number: int
) -> None:
    done = ended(tmp_path, saving, "99", "exit")
    assert (done.returncode, starts(tmp_path)) == (7, number), done.stderr
    assert "3 times without a new saved state: giving up" in done.stderr
    again = ended(tmp_path, saving, "99", "exit")  # as Docker does
    assert (again.returncode, starts(tmp_path)) == (7, number), again.stderr


@pytest.mark.parametrize("trapped", [(), ("trap 'exit 5' TERM;",)])
def test_a_stop_ends_the_command_and_nothing_is_started_again(
    tmp_path: Path, trapped: Sequence[str]
) -> None:
    sleeps = "touch up; while :; do sleep 0.05; done"
    script = subprocess.Popen(
        command(tmp_path, " ".join([*trapped, sleeps])), cwd=tmp_path, env=ENVIRONMENT
    )
    try:
        wait_for(lambda: (tmp_path / "up").exists())
        os.kill(script.pid, signal.SIGTERM)
        assert script.wait(DEADLINE_S) == (5 if trapped else 143)
    finally:
        script.kill()
    assert not (tmp_path / "given_up").exists()
