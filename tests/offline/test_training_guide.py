"""Runs training.sh as the training guide says: under bash, and in a real Slurm of one node.

Slurm needs Debian's packages slurmctld, slurmd, slurm-client and munge, root, and the scripts up.sh
and down.sh that start and end it; $GRPO_SLURM_SCRIPTS names their directory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from grpo_local.process.ports import free_port
from tests.support.wait import wait_for

pytestmark = [pytest.mark.offline, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
SLURM = Path(os.environ.get("GRPO_SLURM_SCRIPTS", ROOT.parent / "shared" / "slurm"))
PROGRAMS = ("sbatch", "slurmctld", "slurmd", "munged")
WINDOW = 20
"""Iterations. Their 2,560 completions let the mean reward vary by 0.01 by chance."""
MIN_RISE = 0.15
"""Of the mean reward of training, from the first window to the last. Measured in 200 iterations:
0.29 for GRPO, 0.34 for MaxEnt-GRPO with two seeds. With a learning rate of 1e-3, MaxEnt-GRPO rises
by 0.09 to 0.10, after it has fallen."""


@pytest.fixture
def repository(tmp_path: Path, tiny_model: Path) -> Path:
    """A directory with the guide's files, so that logs and runs of this test are its own."""
    for name in ("training.sh", "environment.yml", "src", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "training.sh").unlink()
    shutil.copy(ROOT / "training.sh", tmp_path)
    (tmp_path / "logs").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tiny-model").symlink_to(tiny_model)
    return tmp_path


@pytest.fixture
def variables() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHON": sys.executable,
        "VLLM_PORT": str(free_port()),
        "VLLM_FLAGS": f"--health-port {free_port()}",
        "CONFIG": "recipes/tiny/grpo/config.yaml",
        "TIMESTAMP": "now",
    }


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables with which Slurm's commands find the node."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or not (SLURM / "up.sh").is_file() or os.geteuid() != 0:
        pytest.skip(f"no Slurm: {', '.join(missing) or f'no {SLURM}/up.sh, or not root'}")
    directory = tmp_path_factory.mktemp("slurm")
    ports = free_port()
    environment = {**os.environ, "SLURM_PORTS": str(ports)}
    try:
        subprocess.run(
            ["bash", str(SLURM / "up.sh"), str(directory)],
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        yield {"SLURM_CONF": str(directory / "slurm.conf")}
    finally:
        subprocess.run(["bash", str(SLURM / "down.sh"), str(directory)], check=False)


def rise_of_reward(run: Path) -> float:
    """From the first iterations to the last."""
    files = sorted((run / "metrics").glob("train_iter_*.json"))
    rewards = [json.loads(file.read_text())["reward_mean"] for file in files]
    return float(sum(rewards[-WINDOW:]) - sum(rewards[:WINDOW])) / WINDOW


def processes_in(repository: Path) -> dict[int, str]:
    """Processes that work in the repository: server, engine and training."""
    found = {}
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(repository) and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def log_of(repository: Path, kind: str) -> str:
    found = [*(repository / "logs").glob(f"liv_{kind}_tiny-grpo_now.log")]
    return found[0].read_text() if found else ""


def server_of(repository: Path) -> int:
    """The process id of the server that training.sh started, not of its engine."""
    found = [pid for pid, command in processes_in(repository).items() if "-m grpo_vllm" in command]
    [server] = [pid for pid in found if psutil.Process(pid).ppid() not in found]
    return server


def wait_for_training(repository: Path) -> None:
    """Until the first iteration has ended."""
    wait_for(lambda: " 0/" in log_of(repository, "train"), deadline_s=1200.0)


def run(
    command: list[str], repository: Path, variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=repository, env=variables, capture_output=True, text=True)


def train(
    repository: Path, variables: dict[str, str], *words: str
) -> subprocess.CompletedProcess[str]:
    return run(["bash", "training.sh", *words], repository, variables)


@pytest.mark.parametrize("method", ["grpo", "maxent-grpo"])
def test_bash_training_learns_on_a_cpu(
    repository: Path, variables: dict[str, str], method: str
) -> None:
    variables |= {"MAXENT": str(int("maxent" in method))}
    variables |= {"CONFIG": f"recipes/tiny/{method}/config.yaml"}

    done = train(repository, variables)

    assert done.returncode == 0, done.stdout + done.stderr
    names = sorted(path.name for path in (repository / "logs").iterdir())
    assert names == [f"liv_train_tiny-{method}_now.log", f"liv_vllm_tiny-{method}_now.log"]
    directory = repository / "runs" / f"tiny-{method}"
    assert rise_of_reward(directory) >= MIN_RISE
    assert (directory / "final_model" / "model.safetensors").is_file()
    assert not processes_in(repository)


def test_full_weights_and_adapters_travel_through_a_redis_of_its_own(
    repository: Path, variables: dict[str, str]
) -> None:
    for mode, more in (("none", []), ("lora_only", ["--use_peft"])):
        variables |= {"SYNC_MODE": mode}
        words = ["--max_steps", "3", "--output_dir", f"runs/{mode}", *more]
        done = train(repository, variables, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"weights: {mode}" in log_of(repository, "train")
        assert not processes_in(repository)


def test_a_mistake_in_the_recipe_starts_nothing(
    repository: Path, variables: dict[str, str]
) -> None:
    done = train(repository, variables, "--deepspeed", "zero3.json")

    assert done.returncode != 0
    assert "deepspeed: 'zero3.json' is not supported" in done.stderr
    assert not [*(repository / "logs").iterdir()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_bash_leaves_no_process(
    repository: Path, variables: dict[str, str], number: signal.Signals
) -> None:
    launcher = subprocess.Popen(
        ["env", "--default-signal=INT", "bash", "training.sh"],  # a caller may ignore SIGINT
        cwd=repository,
        env=variables,
        start_new_session=True,
    )
    wait_for_training(repository)

    launcher.send_signal(number)

    assert launcher.wait() == 128 + number
    assert not processes_in(repository)


def job_state(job: str, environment: dict[str, str]) -> str:
    shown = subprocess.run(
        ["scontrol", "show", "job", job], env=environment, capture_output=True, text=True
    ).stdout
    return shown.partition("JobState=")[2].partition(" ")[0]


def submit(repository: Path, environment: dict[str, str]) -> str:
    done = run(["sbatch", "--parsable", "training.sh"], repository, environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_sbatch_with_the_guides_header_completes(
    repository: Path, variables: dict[str, str], slurm: dict[str, str]
) -> None:
    environment = variables | slurm

    words = ["sbatch", "--wait", "--parsable", "training.sh", "--max_steps", "5"]
    done = run(words, repository, environment)

    job = done.stdout.strip()
    assert done.returncode == 0, (repository / "logs" / f"slurm_{job}.err").read_text()
    assert job_state(job, environment) == "COMPLETED"
    assert "final_model" in (repository / "logs" / f"slurm_{job}.out").read_text()
    assert not processes_in(repository)


def test_a_server_that_dies_fails_the_job_within_a_minute(
    repository: Path, variables: dict[str, str], slurm: dict[str, str]
) -> None:
    environment = variables | slurm
    job = submit(repository, environment)
    wait_for_training(repository)

    os.kill(server_of(repository), signal.SIGKILL)
    killed_at = time.monotonic()
    wait_for(lambda: job_state(job, environment) == "FAILED", deadline_s=600.0)

    assert time.monotonic() - killed_at < 60  # the guide's own promise
    wait_for(lambda: not processes_in(repository), deadline_s=60.0)
    text = (repository / "logs" / f"slurm_{job}.err").read_text()
    assert "vllm-api-server has ended" in text


def test_scancel_leaves_no_process(
    repository: Path, variables: dict[str, str], slurm: dict[str, str]
) -> None:
    environment = variables | slurm
    job = submit(repository, environment)
    wait_for_training(repository)
    assert processes_in(repository)

    subprocess.run(["scancel", job], env=environment, check=True)

    wait_for(lambda: job_state(job, environment) == "CANCELLED", deadline_s=120.0)
    wait_for(lambda: not processes_in(repository), deadline_s=120.0)
