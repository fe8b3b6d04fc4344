"""The whole command as a user runs it, with a real Redis and stand-ins for the other services."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from grpo_local.metrics_file import MetricsFile
from tests.support.process_table import eventually, is_alive, unrelated_process
from tests.unit.local.stand_ins import write_stand_ins

SERVICES = ["redis", "run-api", "vllm-server", "trainer", "environment"]


def hang_up_by_default() -> None:
    """Under nohup, whose children ignore it, too."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@dataclass
class Demo:
    """`grpo-demo` in an empty working directory."""

    folder: Path
    process: subprocess.Popen[str] | None = None

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        write_stand_ins(self.folder / "stand-ins")
        self.pids.mkdir()
        (self.folder / "tmp").mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "grpo_local", *arguments],
            cwd=self.folder,
            env={
                **os.environ,
                "PYTHONPATH": str(self.folder / "stand-ins"),
                "STAND_IN_PIDS": str(self.pids),
                "TMPDIR": str(self.folder / "tmp"),
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=hang_up_by_default,
        )
        return self.process

    def finish(self) -> tuple[int, str, str]:
        """Exit status, stdout, stderr."""
        assert self.process is not None
        out, err = self.process.communicate(timeout=180)
        return self.process.returncode, out, err

    @property
    def pids(self) -> Path:
        return self.folder / "pids"

    def pid(self, name: str) -> int:
        return int((self.pids / name).read_text())

    def has_pid(self, name: str) -> bool:
        return (self.pids / name).exists()

    def all_ended(self) -> bool:
        return not any(is_alive(self.pid(path.name)) for path in self.pids.iterdir())

    def wait_for_steps(self) -> None:
        metrics = self.folder / "run" / "metrics.jsonl"
        assert eventually(lambda: metrics.exists() and metrics.stat().st_size > 0)
        assert eventually(lambda: self.has_pid("environment") and self.has_pid("engine"))


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    demo = Demo(tmp_path)
    yield demo
    if demo.process is not None and demo.process.poll() is None:
        demo.process.kill()
        demo.process.communicate()


def test_a_run_from_start_to_summary(demo: Demo) -> None:
    demo.start("--steps", "25", "--seed", "4", "--compute-threads", "1")
    status, out, err = demo.finish()
    assert (status, err) == (0, "")
    run = (demo.folder / "runs" / "latest").resolve()
    assert run.name.endswith("-4")
    lines = out.splitlines()
    assert "\x1b" not in out
    assert max(len(line) for line in lines) <= 110
    ready = [line.split()[0] for line in lines if " after " in line]
    assert ready == ["model", *SERVICES]
    assert sum("generate" in line and "publish" in line for line in lines) == 3
    assert [line.split()[0] for line in lines if "/25 " in line] == [
        f"{step}/25" for step in range(1, 26)
    ]
    # rewards 0.04, 0.08, ... 1.0; a tenth of 25 steps is 2
    assert "reward:   0.060 in the first 2 steps, 0.980 in the last 2 steps (mean)" in lines
    assert len(MetricsFile(run / "metrics.jsonl").read_new()) == 25
    assert (run / "reward.png").stat().st_size > 5_000
    assert {path.stem for path in (run / "logs").iterdir()} == {"model", *SERVICES}
    assert "loading stand-in-model " in (run / "logs" / "vllm-server.log").read_text()
    assert demo.all_ended()
    assert list((demo.folder / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_stop_signal_ends_all_that_was_started_and_nothing_else(
    demo: Demo, number: signal.Signals, status: int
) -> None:
    with unrelated_process() as bystander:
        process = demo.start("--run-dir", "run", STAND_IN_TRAINER_LINGERS_S="100")
        demo.wait_for_steps()
        process.send_signal(number)
        ended_with, _, err = demo.finish()
        assert ended_with == status
        expected = f"stopped by {number.name}; every process of this run has ended; logs: run/logs"
        assert err == f"{expected}\n"
        assert demo.all_ended()
        assert is_alive(bystander.pid)


def test_a_stop_signal_while_services_start(demo: Demo) -> None:
    process = demo.start("--run-dir", "run", STAND_IN_TRAINER_LINGERS_S="100")
    assert eventually(lambda: demo.has_pid("run-api"))
    process.send_signal(signal.SIGINT)
    status, out, _ = demo.finish()
    assert status == 130
    assert "reward:" not in out
    assert demo.all_ended()


def test_a_service_that_cannot_start_names_its_log_and_shows_its_end(demo: Demo) -> None:
    demo.start("--run-dir", "run", STAND_IN_SERVER_FAILS="1")
    status, _, err = demo.finish()
    assert status == 1
    assert err.startswith(
        "failed (ProcessFailed): vllm-server ended with status 1 while starting; "
        "see run/logs/vllm-server.log\n"
    )
    assert err.endswith("no such device\n")
    assert demo.all_ended()


def test_every_task_has_an_environment_of_its_own(demo: Demo) -> None:
    (demo.folder / "data").mkdir()
    demo.start(
        *("--run-dir", "run", "--steps", "3"),
        *("--task", "arithmetic,gsm8k", "--data", "data", "--seq-len", "2000"),
    )
    status, out, err = demo.finish()
    assert (status, err) == (0, "")
    ready = [line.split()[0] for line in out.splitlines() if " after " in line]
    assert ready[-2:] == ["environment-arithmetic", "environment-gsm8k"]
    assert "3 steps on arithmetic and gsm8k" in out
    logs = demo.folder / "run" / "logs"
    for task in ("arithmetic", "gsm8k"):
        said = (logs / f"environment-{task}.log").read_text()
        assert said.startswith(f"{task} serve ")
        assert "--env.max-token-length 2000 " in said
    assert "--env.data data" in said
    assert demo.all_ended()


def test_missing_data_is_named_before_anything_starts(demo: Demo) -> None:
    demo.start("--run-dir", "run", "--task", "gsm8k")
    status, out, err = demo.finish()
    assert (status, out) == (2, "")
    assert "--data: Value error, gsm8k needs data: pass --data (with make: DATA=)" in err
    assert not (demo.folder / "run").exists()


def redis_pid(demo: Demo) -> int:
    assert demo.process is not None
    children = psutil.Process(demo.process.pid).children()
    return next(child.pid for child in children if "redis-server" in child.name())


def test_death_of_redis_in_mid_run_ends_the_run(demo: Demo) -> None:
    process = demo.start("--run-dir", "run", STAND_IN_TRAINER_LINGERS_S="100")
    demo.wait_for_steps()
    os.kill(redis_pid(demo), signal.SIGKILL)
    status, _, err = demo.finish()
    assert status == 1
    assert "redis ended with SIGKILL" in err
    assert process.returncode == 1
    assert demo.all_ended()


@pytest.mark.parametrize("name", ["run-api", "vllm-server", "trainer", "environment"])
def test_death_in_mid_run_ends_the_run_at_once(demo: Demo, name: str) -> None:
    process = demo.start("--run-dir", "run", STAND_IN_TRAINER_LINGERS_S="100")
    demo.wait_for_steps()
    killed_at = time.monotonic()
    os.kill(demo.pid(name), signal.SIGKILL)
    assert process.stdout is not None
    assert any("ending every process" in line for line in process.stdout)
    assert time.monotonic() - killed_at < 60  # the trainer would end by itself after 100 s
    status, _, err = demo.finish()
    assert status == 1
    assert f"{name} ended with SIGKILL" in err
    assert f"see run/logs/{name}.log" in err
    assert demo.all_ended()


def test_a_trainer_that_makes_no_step(demo: Demo) -> None:
    demo.start(
        *("--run-dir", "run"),
        *("--steps", "5"),
        *("--step-deadline-s", "0.5"),
        STAND_IN_TRAINS_FIRST="1",
        STAND_IN_LAST_STEP="2",
        STAND_IN_TRAINER_LINGERS_S="100",
    )
    status, _, err = demo.finish()
    assert status == 1
    assert "failed (NoTrainingStep): no training step within 0.5 s, 2 of 5 done" in err
    assert demo.all_ended()


def test_a_trainer_that_ends_early_is_no_success(demo: Demo) -> None:
    demo.start("--run-dir", "run", "--steps", "5", STAND_IN_LAST_STEP="2")
    status, _, err = demo.finish()
    assert status == 1
    assert "trainer ended with status 0 after 2 of 5 steps; see run/logs/trainer.log" in err


def test_a_used_run_directory_is_refused(demo: Demo) -> None:
    (demo.folder / "run").mkdir()
    (demo.folder / "run" / "metrics.jsonl").write_text("")
    demo.start("--run-dir", "run")
    status, out, err = demo.finish()
    assert (status, out) == (1, "")
    assert err.startswith("failed (RunDirectoryUnusable): run holds an earlier run")


def test_help_and_mistakes_answer_without_heavy_imports() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['grpo-demo', *sys.argv[1:]]\n"
        "from grpo_local.__main__ import main\n"
        "try: main()\n"
        "finally: print(sorted({'matplotlib', 'httpx', 'rich', 'redis'} & set(sys.modules)))\n"
    )
    for argument, status in (("--help", 0), ("--no-such-option", 2), ("--steps=0", 2)):
        done = subprocess.run(
            [sys.executable, "-c", code, argument], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout.splitlines()[-1]) == (status, "[]"), done.stderr
