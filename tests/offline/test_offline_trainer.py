"""The offline trainer as its users run it: as commands, with a real inference server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_runs.offline.results import evaluations, train_records
from grpo_runs.offline.run_files import RunFiles
from tests.fixtures.file_sync import HandedOffServer
from tests.fixtures.inference import InferenceServer

pytestmark = [pytest.mark.offline, pytest.mark.timeout(3600)]

TRAINER = Path(__file__).parents[2] / "scripts" / "offline_trainer"
SMALL = ["generation.max_new_tokens=8", "eval.max_new_tokens=8", "model.device=cpu"]
ALL_SUMS = f"eval.ids=[{','.join(map(str, range(100)))}]"
PLAIN = [
    *("generation.temperature=1", "generation.top_p=1", "generation.top_k=0"),
    *("generation.repetition_penalty=1", "eval.temperature=1", "eval.top_p=1"),
]
GUIDE = {
    "quick start": "generation.backend=vllm_server eval.backend=vllm_server train.iterations=10",
    "sweep": "-m train.lr=[5e-6,1e-5,2e-5] train.kl_coef=[0.02,0.05,0.1] train.batch_size=[4,8]",
    "larger model": "",
    "conservative sampling": "generation.temperature=0.5 generation.top_p=0.9",
    "larger batches": "generation.batch_size=16 eval.batch_size=16",
    "aggressive training": "train.lr=5e-5 train.batch_size=16 data.problems_per_iteration=8",
    "conservative training": "train.lr=5e-6 train.kl_coef=0.02 train.batch_size=4",
    "quick iteration": "data.problems_per_iteration=2",
    "full search": "-m train.lr=[5e-6,1e-5,2e-5] train.kl_coef=[0.02,0.05,0.1]",
    "overnight": "train.lr=1e-5 data.problems_per_iteration=8 eval.interval=5",
}
"""The commands of the guide, without model, URL, device and number of iterations."""


def command(script: str, *words: str) -> list[str]:
    return [sys.executable, str(TRAINER / script), *words]


def run(directory: Path, *words: str) -> str:
    """Run `run_offline_grpo.py`; returns what it printed."""
    words_of_python = command("run_offline_grpo.py", *words)
    done = subprocess.run(words_of_python, cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def of_server(server: InferenceServer, model: Path) -> list[str]:
    return [*SMALL, f"model.train_id={model}", f"generation.base_url={server.url}", *LIMITS]


LIMITS = ["grpo.seq_len=128", "env_server.seq_len=128"]


@pytest.mark.parametrize("name", [*GUIDE])
def test_a_command_of_the_guide(
    name: str, shared_server: InferenceServer, tiny_model: Path, tmp_path: Path
) -> None:
    words = GUIDE[name].split()
    where = [f"hydra.run.dir={tmp_path}/run", f"hydra.sweep.dir={tmp_path}/sweep"]
    run(tmp_path, *words, *of_server(shared_server, tiny_model), "train.iterations=1", *where)
    if "-m" in words:
        jobs = json.loads((tmp_path / "sweep/sweep.json").read_text())["jobs"]
        assert len(jobs) == (18 if name == "sweep" else 9)
        assert all(job["error"] is None for job in jobs)
        directories = [tmp_path / "sweep" / job["directory"] for job in jobs]
    else:
        directories = [tmp_path / "run"]
    for directory in directories:
        (record,) = train_records(RunFiles(directory))
        assert record["failed_checks"] == 0
        assert not record["frozen"]


@pytest.mark.parametrize("kl_coef", [0.0, 0.02])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_hundred_iterations_teach_sums(
    tiny_model: Path, tmp_path: Path, seed: int, kl_coef: float
) -> None:
    run(
        tmp_path,
        *("generation.backend=local", f"model.train_id={tiny_model}", *SMALL, *PLAIN, *LIMITS),
        *("train.iterations=100", "train.lr=2e-4", "train.batch_size=64"),
        *(f"train.kl_coef={kl_coef}", f"seed={seed}", "eval.interval=100", ALL_SUMS),
        *("data.problems_per_iteration=16", "data.rollouts_per_problem=8"),
        *("data.num_train_seeds=80", f"hydra.run.dir={tmp_path}/run"),
    )
    found = evaluations(RunFiles(tmp_path / "run"))
    before, after = found[0][1][0], found[-1][1][0]
    assert before["items"] == 100
    assert after["mean@1"] - before["mean@1"] >= 0.15


def aligned(directory: Path) -> list[float]:
    """Mean differences between served and trained logprobs, where they were compared."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    key = "alignment/probe_abs_mean"
    return [record[key] for record in records if key in record]


OBJECTIVES = {
    "grpo": "",
    "maxent": "grpo.objective=maxent grpo.maxent_tau=0.2 grpo.maxent_target_entropy=1.0 "
    "grpo.maxent_tau_lr=0.5",
}


@pytest.mark.parametrize("objective", [*OBJECTIVES])
def test_served_logprobs_are_the_trained_ones_in_mode_shared_vllm(
    objective: str, shared_server: InferenceServer, tiny_model: Path, tmp_path: Path
) -> None:
    words = [
        *of_server(shared_server, tiny_model),
        *OBJECTIVES[objective].split(),
        "train.iterations=3",
    ]
    said = run(tmp_path, *words, f"hydra.run.dir={tmp_path}/run")
    assert "weights: shared_vllm" in said
    found = aligned(tmp_path / "run")
    assert len(found) >= 3
    assert max(found) < 1e-3
    assert_tau_moves(tmp_path / "run", objective)


@pytest.mark.parametrize("objective", [*OBJECTIVES])
@pytest.mark.parametrize("mode", ["none", "lora_only", "lora_restart"])
def test_served_logprobs_are_the_trained_ones_in_modes_with_files(
    mode: str, objective: str, request: pytest.FixtureRequest, redis_url: str, tmp_path: Path
) -> None:
    fixture = "plain" if mode == "none" else "lora"
    served: HandedOffServer = request.getfixturevalue(fixture)
    said = run(
        tmp_path,
        *of_server(served.server, served.server.model),
        *(f"sync.mode={mode}", f"++grpo.redis_url={redis_url}", "train.iterations=2"),
        *("data.task=gsm8k", f"env_server.data={_rows(tmp_path)}", "env_server.held_out=0.4"),
        *OBJECTIVES[objective].split(),
        f"hydra.run.dir={tmp_path}/run",
    )
    assert f"weights: {mode}" in said
    assert len(aligned(tmp_path / "run")) >= 2
    assert_tau_moves(tmp_path / "run", objective)


def assert_tau_moves(directory: Path, objective: str) -> None:
    """Towards the entropy that it is driven to."""
    first, *_, last = train_records(RunFiles(directory))
    if objective == "maxent":
        is_below = first["maxent_weights_entropy"] < 1.0
        assert (last["maxent_tau"] > first["maxent_tau"]) == is_below
    else:
        assert "maxent_tau" not in last


def _rows(directory: Path) -> Path:
    path = directory / "rows.jsonl"
    rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("script", "end"),
    [("smoke_test.py", "Eval metrics: {'pass@1':"), ("run_tests.py", "7/7 tests passed")],
)
def test_a_script_that_needs_no_server(script: str, end: str, tmp_path: Path) -> None:
    done = subprocess.run(command(script), cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].startswith(end)


def test_the_integration_tests_pass_on_a_real_server(
    shared_server: InferenceServer, tmp_path: Path
) -> None:
    words = command("test_gpu_integration.py", shared_server.url)
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    *_, device, end = done.stdout.splitlines()
    assert device == "trained on: CPU"
    assert end == "4/4 passed"
