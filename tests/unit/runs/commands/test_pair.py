"""`grpo-run` with small programs that replace server and trainer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo_core.settings import load_settings
from grpo_runs.commands.pair import run_pair
from grpo_runs.process.ports import free_port
from grpo_runs.settings.run import RunSettings
from tests.support.process_table import is_alive
from tests.unit.runs.stand_ins import SMOLLM2, Shown, write_programs

SERVER = """
from stand_in_common import *
print(*sys.argv[1:], flush=True)
engine = subprocess.Popen(["sleep", "600"], start_new_session=True)
pathlib.Path("pids").write_text(f"{os.getpid()} {engine.pid}")

serve(lambda *_: (503, {}))  # until the trainer has written its weights back
"""
TRAINER = """
from stand_in_common import *
print(*sys.argv[1:], flush=True)

def end(number, _):
    print("ending after", signal.Signals(number).name, flush=True)
    sys.exit(128 + number)

for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, end)
does = os.environ.get("STAND_IN_DOES", "")
if does == "fails":
    sys.exit("no such module: lm_tail")
if does == "kills the server":
    os.kill(int(pathlib.Path("pids").read_text().split()[0]), signal.SIGKILL)
    time.sleep(600)
if does.startswith("SIG"):
    os.kill(os.getppid(), signal.Signals[does])
    time.sleep(600)
"""


@dataclass
class Together:
    folder: Path
    shown: Shown
    patch: pytest.MonkeyPatch

    def run(self, *arguments: str, does: str = "") -> int:
        """Returns the exit status after server, engine and trainer have ended."""
        self.patch.setenv("STAND_IN_DOES", does)
        given = ["--model", "m", "--redis-url", "redis://127.0.0.1:1/0", "--port", str(free_port())]
        words = [*given, *arguments]
        status = run_pair(load_settings(RunSettings, words), self.shown)
        pids = (self.folder / "pids").read_text().split()
        assert not any(is_alive(int(pid)) for pid in pids)
        return status

    def said(self, name: str) -> str:
        return (self.folder / "logs" / f"{name}.log").read_text()


@pytest.fixture
def together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Together:
    stand_ins = tmp_path / "stand-ins"
    write_programs(stand_ins, grpo_vllm=SERVER, grpo_trainer=TRAINER, grpo_tiny_model=SMOLLM2)
    monkeypatch.setenv("PYTHONPATH", str(stand_ins))
    monkeypatch.chdir(tmp_path)
    for model in ("m", "made"):
        (tmp_path / model).mkdir()
        (tmp_path / model / "config.json").write_text("{}")
    return Together(tmp_path, Shown(), monkeypatch)


def test_server_and_trainer_start_with_what_the_mode_needs_and_both_end(together: Together) -> None:
    status = together.run(
        *("--mode", "lora_restart", "--vllm-restart-interval", "5", "--server-flags=--seed 3"),
        *("--save-path", "saved"),
        *("--trainer.lr", "1", "--server.swap-space=2", "--dtype", "float32", "--batch-size", "4"),
        *("--", "--training-steps", "4"),
    )
    assert (status, together.shown.err) == (0, "")
    assert "vllm-server ready after" in together.shown.out
    served, trained = together.said("vllm-server"), together.said("trainer")
    assert f"--weights-dir {together.folder}/saved/served_weights" in served
    assert "--enable-lora" in served
    assert "--seed 3 --swap-space=2" in served
    for flags in (
        *("--vllm-restart-interval 5", "--save-path saved", "--lr 1.0", "--batch-size 4"),
        "--steps 4",
    ):
        assert flags in trained
    assert "--dtype float32 --max-model-len 4096" in served
    assert "--dtype float32" in trained
    assert trained.splitlines()[0] in together.shown.out


def test_smollm2_is_made_before_server_and_trainer_start(together: Together) -> None:
    assert (together.run("--model", "smollm2"), together.shown.err) == (0, "")
    assert "model       ready after" in together.shown.out
    for name in ("vllm-server", "trainer"):
        assert together.said(name).startswith("--model made ")


def test_the_exit_status_is_the_trainers_and_its_last_words_are_shown(together: Together) -> None:
    assert together.run("--on-end", "tee end.json", does="fails") == 1
    told = json.loads((together.folder / "end.json").read_text())
    assert (told["event"], told["state"]) == ("end", "failed")
    assert "no such module: lm_tail" in together.shown.out


def test_a_signal_reaches_the_trainer_which_may_finish(together: Together) -> None:
    assert together.run(does="SIGINT") == 130
    assert "ending after SIGINT" in together.shown.out


def test_a_server_that_dies_ends_the_trainer(together: Together) -> None:
    assert together.run(does="kills the server") == 1
    assert together.shown.err.startswith("failed (ProcessFailed): vllm-server ended with SIGKILL")
    assert "ending after SIGTERM" in together.said("trainer")
