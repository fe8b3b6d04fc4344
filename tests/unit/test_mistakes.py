"""Typical mistakes of a user: each ends at once, with one line that names the fix."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo_api.__main__ import main as run_api
from grpo_env.__main__ import main as env_server
from grpo_runs.__main__ import compare, evaluate, report
from grpo_runs.__main__ import main as demo
from grpo_runs.__main__ import run as grpo_run
from grpo_tiny_model.__main__ import main as tiny_model
from grpo_trainer.__main__ import main as grpo
from grpo_vllm.__main__ import main as vllm_api_server
from tests.unit.conftest import Mistake, Refused

TRAINER = "--model m --mode shared_vllm"
ENVIRONMENT = "arithmetic serve --model m"
RUN = "--model m --redis-url redis://127.0.0.1:1/0 --port {free}"

MISTAKES: dict[Callable[[], None], dict[str, str]] = {
    grpo: {
        f"{TRAINER} --batchsize 3": "--batchsize: no such option; did you mean --batch-size?",
        f"{TRAINER} --learning-rate 1e-5": "--learning-rate: no such option; did you mean --lr?",
        "--mode none": "--model is required. Model to train",
        f"{TRAINER} --steps": "--steps: expected a value after it",
        "--model {tmp}/gone --mode shared_vllm": "--model: no such directory: {tmp}/gone",
        "--model {tmp} --mode shared_vllm": "--model: no config.json in {tmp}",
        "--model m --mode lora_restrat": "did you mean lora_restart?",
        f"{TRAINER} --world-size 2": (
            "--world-size: 2: mode shared_vllm needs one trainer process, because it trains the "
            "server's own memory; pass --mode none, lora_only or lora_restart, or start one "
            "process"
        ),
        "--model m --mode none --fsdp": "--fsdp: needs several trainer processes; pass --ranks",
        f"{TRAINER} --ranks 2": "--ranks: 2: mode shared_vllm needs one trainer process",
        "--model m --mode none --nodes 2": "--nodes: 2: needs --rendezvous HOST:PORT",
        "--model m --mode none --rendezvous a:1": "--rendezvous: has no effect without --nodes",
        "--model m --mode none --ranks 2 --world-size 3": "--world-size: 3: omit it with --ranks",
        "--model m --mode none --world-size 2 --device cuda:1": (
            "--device: cuda:1: each of 2 trainer processes uses the GPU of its --local-rank"
        ),
        "--model m --mode none --world-size 2 --rank-deadline-s 900": (
            "--rank-deadline-s: 900: other ranks wait while rank 0 waits for a batch or for the "
            "server"
        ),
        "--model m --mode lora_only --vllm-restart-interval 5 --adapter-sync-interval 4": (
            "differs from --vllm-restart-interval"
        ),
        "--model m --single-copy=false": "--single-copy: this option accepts no value except true",
        f"{TRAINER} --packing yes": "--packing: ",
        "--model m --mode lora_only --lora-layer-indices 3-1": "--lora-layer-indices: ",
        "--model m --mode none --train-layer-indices 3-1": "--train-layer-indices: ",
        "--model m --mode lora_only --master-dtype bfloat16": (
            "--master-dtype: mode lora_only trains an adapter, whose master weights must be"
        ),
        "--model m --mode shared_vllm --num-inference-nodes 2": (
            "--num-inference-nodes: 2: mode shared_vllm trains the memory of one server; pass 0"
        ),
        "--model m --mode lora_restart --redis-url redis://h --max-staleness 1": (
            "groups are up to 2 steps old; pass 2 or more, or publish more often"
        ),
        "--config {tmp}/gone.yaml": "--config: cannot read {tmp}/gone.yaml",
        "--config {tmp}/broken.yaml": "broken.yaml is not YAML: line 2",
        "--config {tmp}/key.yaml": "key.yaml:1: traning-steps: no such option; did you mean",
        "--config {tmp}/mode.yaml": "mode.yaml:2: mode: expected one of shared_vllm",
        "--config {tmp}/tag.yaml": "tag.yaml is not YAML: IndexError",
        "--config {tmp}/deep.yaml": "deep.yaml is not YAML: RecursionError",
        f"--model {300 * 'x'} --mode none": "--model: File name too long; name another path",
        "--model ~nobody-here/x --mode none": "--model: Could not determine home directory; name",
        f"{TRAINER} --config {{tmp}}/value.yaml": "value.yaml:1: steps: expected a whole number",
        f"{TRAINER} --save-path {{tmp}}/key.yaml/run": "--save-path: {tmp}/key.yaml is not a",
        f"{TRAINER} --config=": "--config: ",
        f"{TRAINER} --dry-run=false": "--dry-run takes no value",
        f"{TRAINER} --vllm-port=abc": "--vllm-port: expected a port, 1 to 65535; got 'abc'",
    },
    env_server: {
        "gsm8k serve --model m --data rows/sumz.jsonl": "no such file: rows/sumz.jsonl",
        "gsm8k serve --model m --data {tmp}/gone": "--data: no such directory",
        f"{ENVIRONMENT} --env.group_size=1": "--env.group_size: every group of 1 has equal scores",
        f"{ENVIRONMENT} --env.temperature=0": "--env.temperature",
        f"{ENVIRONMENT} --env.rollout_server_url localhost:8000": (
            "--env.rollout_server_url: expected a URL such as http://localhost:8000"
        ),
        f"{ENVIRONMENT} --openai.server_type=openai": "logprob of every sampled token",
        f"{ENVIRONMENT} --env.groupsize 3": "did you mean --env.group-size",
        f"{ENVIRONMENT} --config=/nonexistent.yaml": "cannot read /nonexistent.yaml",
        "arithmetic serve": "--model is required",
        "chess serve --model m": "TASK: no task 'chess'; expected one of arithmetic, gsm8k",
        f"{ENVIRONMENT} --seq-len 64 --max-completion-tokens 64": "exceed --seq-len 64",
        f"{ENVIRONMENT} --command true": "--command: only the task agent has this option",
        f"{ENVIRONMENT} --agent-calls 3": "--agent-calls: only the task agent has this option",
        "agent check --sandbox none --answers {tmp}/value.yaml --reward gsm8k --command true": (
            "--answers: the reward rates what the agent did"
        ),
        "agent serve --sandbox none --model m --reward agent --command true": (
            "--reward: expected a reward, for"
        ),
        "agent serve --model m --reward gsm8k": "needs an agent: either --command",
        "agent serve --sandbox none --model m --command true": "the task agent needs --reward",
        "agent serve --sandbox none --model m --reward gsm8k --command gone.sh": (
            "--command: there is no program 'gone.sh'"
        ),
        "agent serve --sandbox none --model m --reward chess --command true": (
            "--reward: no task 'chess'"
        ),
        "agent serve --model m --reward gsm8k --agent {tmp}/my.py": "--agent: cannot read {tmp}/my",
        "agent serve --model m --reward gsm8k --agent pkg:": (
            "--agent: no function 'pkg:'; expected a file such as my.py:agent"
        ),
    },
    vllm_api_server: {
        "--model {tmp}/adapter": "--model: {tmp}/adapter is an adapter; name its base",
        "--model m --port {port}": "choose another port, or end the process",
    },
    demo: {
        "--run-dir {tmp}/run --batch-size 3 --gradient-accumulation-steps 1": (
            "--group-size: 8 does not divide the 3 sequences of a step"
        ),
        "--run-dir {tmp}/run --trainer.max-stalenes 4": (
            "--trainer.max-stalenes: no such option; did you mean --trainer.max-staleness?"
        ),
        "--task agent --sandbox none --command true --reward arithmetic --agent-sequences 3": (
            "--agent-sequences: a group of --group-size 8 has 24 sequences, which do not divide"
        ),
        "--stesp 3": "--stesp: no such option; did you mean --steps?",
        "3": "'3': unexpected; every option begins with --",
        "--task gsm8k": "gsm8k needs --data (with make: DATA=)",
        "--seq-len 100 --max-model-len 50": "--max-model-len: 50 is less than --seq-len 100",
        "--max-completion-tokens 128": "--max-completion-tokens: a prompt and 128 completion",
        "--run-dir /dev": "--run-dir /dev: this path is not an empty directory; name",
        "--resume /dev": "--resume: /dev: no config.yaml in it; name the directory of a run",
        "--server.api-key y": "--server.api-key: grpo-demo sets this option; write --run-api-",
        "--trainer.vllm-api-key y": "this option; write --run-api-token",
        "--trainer.metrics-file m": "--trainer.metrics-file: grpo-demo sets this option itself",
        "--run-dir a{b}": "--run-dir: the run's id would be 'a{b}', but spaces and braces",
        "--objective distill": "--objective: needs a teacher: pass --teacher-model or",
        "--teacher-model tiny": "--teacher-model: has no effect without --objective distill or",
        "--resume --steps 3": "--resume: expected a value after it",
    },
    run_api: {
        "--port {port}": "--port: cannot listen on 127.0.0.1:{port}: Address already in use",
        "--log-level loud": "--log-level: expected one of DEBUG, INFO, WARNING, ERROR",
    },
    tiny_model: {
        "--smollm2 --tools": "--tools: smollm2 has no such variant",
    },
    compare: {
        "--modes none,some": "--modes: expected one of shared_vllm",
        "--side-by-side --gpu-ids 0,1": "--gpu-ids: 2 GPUs for 4 modes; name one GPU for each mode",
        "--gpu-ids 0": "--gpu-ids: this option needs --side-by-side",
        "--weight-bridge-mode none": "--weight-bridge-mode: a run of a comparison does not accept",
        "-- --seed=5": "a run of a comparison does not accept this option; write --seed before",
        "--directory /dev": "--directory /dev: this path is not an empty directory; name",
        "--modes none -- --lr x": "grpo-compare: --lr: expected a number, greater than 0; got 'x'",
    },
    grpo_run: {
        f"{RUN} --batchsize 30": "--batchsize: no such option; did you mean --batch-size?",
        f"{RUN} --world-size 2": "--world-size: grpo-run starts the ranks: write --ranks",
        f"{RUN} --weights-socket x": "--weights-socket: grpo-run sets this option itself",
        f"{RUN} -- --batch_size=x": "--batch_size: expected a whole number",
        f"{RUN} -- --weights-socket x": "--weights-socket: grpo-run sets this option itself",
        f"{RUN} --server-flags='half": (
            "--server-flags: cannot split the value into words as a shell does"
        ),
        f"{RUN} --health-port {{free}}": "--port and --health-port are both {free}",
    },
    report: {
        "": "RUN is required. Directory of the run",
        "none": "RUN: no such directory: none; name the directory of a run",
        "/dev --output /tmp": "--output: /tmp is a directory; name a file",
        "/dev --output /dev/null/page": (
            "--output: /dev/null is not a directory; choose another path"
        ),
    },
}
"""Arguments of each command, and part of what it writes. `{tmp}` is a directory, `{port}` a port in
use, `{free}` one that is not."""
WITH_VARIABLES = {
    "RANK=2 WORLD_SIZE=2": "RANK: 2 is not below --world-size 2",
    "MASTER_PORT=70000": "MASTER_PORT: ",
    "GRPO_TRAINING_STEPS=ten": (
        "GRPO_TRAINING_STEPS: expected a whole number, at least 1; got 'ten'"
    ),
    "GRPO_VLLM_PORT=abc": "GRPO_VLLM_PORT: expected a port",
    "GRPO_STEPS=60 GRPO_TRAINING_STEPS=5": (
        "GRPO_STEPS and GRPO_TRAINING_STEPS are one option, but differ"
    ),
}


@pytest.fixture
def places(tmp_path: Path) -> Iterator[dict[str, str]]:
    (tmp_path / "broken.yaml").write_text("model: m\nsteps: 3: 4\n")
    (tmp_path / "key.yaml").write_text("traning-steps: 3\n")
    (tmp_path / "mode.yaml").write_text("model: m\nmode: []\n")
    (tmp_path / "tag.yaml").write_text("steps: !!int ''\n")
    (tmp_path / "deep.yaml").write_text(f"steps: {1000 * '['}\n")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").touch()
    (tmp_path / "value.yaml").write_text("steps: many\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        yield {"{tmp}": str(tmp_path), "{port}": port, "{free}": str(_free_port())}


@pytest.mark.parametrize(
    ("command", "arguments", "told"),
    [(command, *row) for command, rows in MISTAKES.items() for row in rows.items()],
)
def test_a_mistake_ends_with_a_line_that_names_the_fix(
    command: Callable[[], None], arguments: str, told: str, places: dict[str, str], mistake: Mistake
) -> None:
    for name, value in places.items():
        arguments, told = arguments.replace(name, value), told.replace(name, value)
    assert told in mistake(command, arguments)


@pytest.mark.parametrize(("variables", "told"), WITH_VARIABLES.items())
def test_a_wrong_variable_is_named(
    variables: str, told: str, monkeypatch: pytest.MonkeyPatch, mistake: Mistake
) -> None:
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    assert told in mistake(grpo, "--model m --mode none --redis-url redis://h")


@pytest.mark.parametrize("task", ["arithmetic", "agent --command python --reward arithmetic"])
def test_a_sandbox_that_does_not_work_is_a_mistake_before_anything_starts(
    task: str, mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    told = mistake(demo, f"--task {task} --sandbox docker:gone --dry-run")
    assert told.startswith("grpo-demo: docker is not installed")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--task lacks.py --data rows.jsonl --dry-run", "lacks.py line 1: ModuleNotFoundError"),
        ("--task my.py --data rows.jsonl --columns prompt=q", "no column 'q'"),
        ("--task arithmetic,my.py --data column.jsonl", "expected one of prompt, messages"),
        ("--task dies.py --data rows.jsonl", "dies.py: loading it ended with SIGKILL"),
        ("--task waits.py --data rows.jsonl --start-deadline-s 5", "raise --start-deadline-s"),
    ],
)
def test_a_mistake_in_code_or_data_is_told_before_a_run_begins(
    words: str, told: str, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my.py").write_text("def reward(answer, row):\n    return 1\n")
    (tmp_path / "lacks.py").write_text("import no_such_module\nfrom my import reward\n")
    (tmp_path / "dies.py").write_text("import os\nos.kill(os.getpid(), 9)\nfrom my import reward\n")
    (tmp_path / "waits.py").write_text("import time\ntime.sleep(600)\nfrom my import reward\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "3+4="}\n')
    (tmp_path / "column.jsonl").write_text('{"promt": "3+4="}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["command", *words.split()])
    said = refused(demo)
    assert said.startswith("grpo-demo: ")
    assert told in said
    assert not Path("runs").exists()


WITH_SMOLLM2 = {
    "grpo-demo": (demo, "--model smollm2"),
    "grpo-compare": (compare, "--modes none --model smollm2"),
    "grpo-eval": (evaluate, "--model smollm2 --task arithmetic"),
    "grpo-run": (grpo_run, "--model smollm2"),
    "env-server": (env_server, "check arithmetic --model smollm2"),
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
    name: str, mistake: Mistake
) -> None:
    assert mistake(*WITH_SMOLLM2[name]).startswith(f"{name}: --model: {NEEDS_GGUF}")
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
        ports = ("--port", str(_free_port()), "--health-port", str(_free_port()))
        ended = run("grpo_vllm", *flags, *ports)
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
