"""`containers/restarting.sh` around a command that fails, as in the trainer's container."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.wait import DEADLINE_S, wait_for

SCRIPT = Path(__file__).parents[2] / "containers" / "restarting.sh"
LIMIT = "2"
SHORT_SLEEP = {"BASH_FUNC_sleep%%": "() { command sleep 0.01; }"}
"""An exported function of bash, which the script takes for `sleep`."""
ENVIRONMENT = os.environ | {"RUN_ID": "run"} | SHORT_SLEEP
TRAINER = """
echo start >> starts
n=$(wc -l < starts)
name=$(printf "%06d_step_%s" "$n" "${4:-$n}")
case " $1 " in *" $n "*) mkdir -p "saves/run/trainer_state/$name" ;; esac
[ "$n" -lt "$2" ] || exit 0
[ "$3" != kill ] || kill -KILL $$
exit 7
"""
"""Arguments: starts that save a state, the start that ends well, how the others end, and the step
of every state (else the number of the start)."""
LEAVES_A_SERVER = """
if [ -e port ]; then exit 9; fi
[ ! -e died ] || exit 0
touch died
serve='trap "sleep 0.3; rm port; exit" TERM; echo $$ > port; while :; do sleep 0.05; done'
setsid bash -c "$serve" >/dev/null 2>&1 &
until [ -s port ]; do sleep 0.05; done
kill -KILL $$
"""


def command(directory: Path, *trainer: str, limit: str = LIMIT) -> list[str]:
    return [
        *("bash", str(SCRIPT), "trainer", limit, "saves", str(directory / "given_up")),
        *("bash", "-c", *trainer),
    ]


def ended(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(directory, command(directory, TRAINER, "trainer", *arguments))


def run(directory: Path, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=directory, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )


def starts(directory: Path) -> int:
    return len((directory / "starts").read_text().splitlines())


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_it_is_started_again_as_long_as_states_are_saved_between_failures(
    tmp_path: Path, how: str
) -> None:
    done = ended(tmp_path, "1 3", "5", how)
    assert (done.returncode, starts(tmp_path)) == (0, 5), done.stderr


@pytest.mark.parametrize(
    ("saving", "step", "number"),
    [("", "", 3), ("2", "", 4), ("1 2 3 4 5 6 7 8", "0", 3)],  # the last as with --resume never
)
def test_without_a_new_state_it_is_given_up_with_its_status(
    tmp_path: Path, saving: str, step: str, number: int
) -> None:
    done = ended(tmp_path, saving, "9", "exit", step)
    assert (done.returncode, starts(tmp_path)) == (7, number), done.stderr
    assert "is not restarted any more: 3 failures without a new checkpoint" in done.stderr
    again = [ended(tmp_path, saving, "9", "exit", step) for _ in range(2)]  # as Docker does
    assert [(each.returncode, starts(tmp_path)) for each in again] == [(7, number)] * 2
    assert ["its last exit status was 7" in each.stderr for each in again] == [True, False]
    assert again[1].stderr == ""


def test_a_limit_that_is_no_number_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, command(tmp_path, "true", limit="three"))
    assert (done.returncode, "a whole number" in done.stderr) == (2, True)


@pytest.mark.skipif(shutil.which("tini") is None, reason="tini, which the images have, is missing")
def test_what_a_killed_command_leaves_behind_has_ended_before_the_next_start(
    tmp_path: Path,
) -> None:
    try:
        done = run(tmp_path, ["tini", "-s", "--", *command(tmp_path, LEAVES_A_SERVER)])
    finally:
        if (port := tmp_path / "port").exists():
            os.kill(int(port.read_text()), signal.SIGKILL)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "died").exists()


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
