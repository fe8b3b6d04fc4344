"""`grpo-eval` as a user runs it, with small programs that replace the server and env-server."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo_core.evaluation.results import read_result, read_summaries
from grpo_core.settings import load_settings
from grpo_runs.__main__ import evaluate
from grpo_runs.commands.evaluate import evaluate_models
from grpo_runs.settings.evaluate import EvalSettings
from tests.support.process_table import is_alive
from tests.unit.conftest import Mistake
from tests.unit.runs.stand_ins import SMOLLM2, Shown, write_programs

SERVER = """
from stand_in_common import *

print(*sys.argv[1:], os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
pathlib.Path(f"pid-{os.getpid()}").touch()
served = [option("--model")]

def answer(path, body, headers):
    if not body:
        return 200, {"served": served[0]}
    if headers.get("Authorization") != "Bearer a-secret":
        return 401, {"detail": "no key"}
    if "--enable-lora" not in sys.argv:
        return 404, {"detail": "no adapters"}
    served[0] = json.loads(body)["adapter_path"]
    return 200, {}

serve(answer)
"""
ENVIRONMENT = """
from stand_in_common import *

task = sys.argv[1]
print(*sys.argv[1:], flush=True)
if task == "broken:task":
    sys.exit("env-server: DataUnusable: rows.jsonl line 3: the row is not JSON")
if task == "stopped:task":
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(600)
from grpo_core.evaluation.results import EvalItem, EvalResult, save

served = json.loads(fetch(option("--inference-url") + "/which"))["served"]
assert os.environ["VLLM_API_KEY"] == "a-secret"
right = 36 if "trained" in served else 12  # of 40
k = int(option("--eval-samples"))
answers = {"parts": [{}] * k, "lengths": [3] * k, "truncated": [False] * k}
items = [
    EvalItem(task=task, item=str(n), rewards=[float(n < right)] * k, **answers)
    for n in range(40)
]
temperature = float(option("--eval-temperature"))
result = EvalResult.of(items, task=task, temperature=temperature, duration_s=1.0)
if task != "silent:task":
    print("evaluation.progress done=20 items=40 left_s=7 task=x", flush=True)
    details = save(result, pathlib.Path(option("--eval-output")))
    details.with_suffix(".html").write_text("answers of " + served)
"""


@dataclass
class Evaluation:
    folder: Path
    shown: Shown

    def run(self, *words: str) -> int:
        """Returns the exit status after every server has ended."""
        status = evaluate_models(settings(*words), self.shown)
        pids = [int(path.name.removeprefix("pid-")) for path in self.folder.glob("pid-*")]
        assert not any(is_alive(pid) for pid in pids)
        return status

    def log(self, name: str) -> list[str]:
        return (self.folder / "eval/logs" / f"{name}.log").read_text().splitlines()


def settings(*words: str) -> EvalSettings:
    key = {"VLLM_API_KEY": "a-secret"}
    return load_settings(EvalSettings, words, key, at_start=True)


def make_model(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"max_position_embeddings": 512}')
    return path


def make_adapter(path: Path, base: Path | None, rank: int = 12) -> Path:
    path.mkdir(parents=True)
    config = {"r": rank} | ({"base_model_name_or_path": str(base)} if base else {})
    (path / "adapter_config.json").write_text(json.dumps(config))
    (path / "adapter_model.safetensors").touch()
    return path


@pytest.fixture
def evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluation:
    stand_ins = tmp_path / "stand-ins"
    write_programs(stand_ins, grpo_vllm=SERVER, grpo_env=ENVIRONMENT, grpo_tiny_model=SMOLLM2)
    path = os.pathsep.join([str(stand_ins), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("VLLM_API_KEY", "another")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "plain")
    return Evaluation(tmp_path, Shown())


def test_two_models_are_evaluated_on_the_same_items_and_the_lift_is_printed(
    evaluation: Evaluation,
) -> None:
    make_model(Path("trained"))
    words = ["--model", "./trained", "--baseline", "./plain", "--task", "arithmetic,gsm8k"]
    words += ["--samples", "4", "--ks", "1,2", "--server.swap-space=2", "--env.weight=3"]
    assert (evaluation.run(*words), evaluation.shown.err) == (0, "")

    out = evaluation.shown.out
    assert "20 of 40 items, ~7 s left" in out
    pages = {path.read_text() for path in evaluation.folder.rglob("*.html")}
    assert {page.rpartition("/")[2].rpartition(" ")[2] for page in pages} == {"trained", "plain"}
    assert "gsm8k: ./trained\n  40 items, 4 answers each, temperature 1" in out
    for task in ("arithmetic", "gsm8k"):
        lift = out.partition(f"{task}: lift, paired by item (40 items in both)")[2]
        assert "  pass@1        0.300    0.900   +0.600" in lift
    assert "pass@2" in out
    assert "pass@4" not in out
    lines = read_summaries(Path("eval.jsonl"))
    assert [(line.model, line.task, line.metrics["pass@1"]) for line in lines] == [
        ("./plain", "arithmetic", 0.3),
        ("./plain", "gsm8k", 0.3),
        ("./trained", "arithmetic", 0.9),
        ("./trained", "gsm8k", 0.9),
    ]
    assert sorted(path.name for path in Path("eval").glob("*.json")) == [
        *("arithmetic-baseline.json", "arithmetic.json"),
        *("gsm8k-baseline.json", "gsm8k.json"),
    ]
    assert len(read_result(Path("eval/gsm8k.json")).items) == 40
    served = evaluation.log("vllm-server")
    assert [line.split()[1] for line in served if "--model" in line] == ["./plain", "./trained"]
    assert "--no-share-weights" in served[0]
    assert "--redis-url none" in served[0]
    assert "--max-model-len 512" in served[0]
    assert "--swap-space=2" in served[0]
    asked = evaluation.log("evaluate")[0]
    assert asked.startswith("arithmetic evaluate --model ./plain")
    for words in (
        *("--eval-items 200", "--eval-samples 4", "--eval-temperature 1.0", "--seq-len 512"),
        *("--seed 0", "--weight 3.0"),
    ):
        assert words in asked


def test_an_adapter_and_its_base_model_share_one_server(evaluation: Evaluation) -> None:
    adapter = make_adapter(Path("run/trained"), Path("plain").resolve())
    words = ["--model", str(adapter), "--baseline", "base", "--task", "arithmetic", "--greedy"]
    assert (evaluation.run(*words, "--device", "cuda:1"), evaluation.shown.err) == (0, "")

    (served,) = [line for line in evaluation.log("vllm-server") if "--model" in line]
    weights_dir = adapter.parent.resolve()
    assert f"--enable-lora --max-lora-rank 16 --weights-dir {weights_dir}" in served
    assert served.endswith(" 1")  # the GPU
    assert "pass@1        0.300    0.900   +0.600" in evaluation.shown.out
    base, trained = read_summaries(Path("eval.jsonl"))
    assert base.model == f"{Path('plain').resolve()} (base)"
    assert (trained.model, trained.samples, trained.temperature) == ("run/trained", 1, 0.0)


@pytest.mark.parametrize("name", ["smollm2", pytest.param("tiny", marks=pytest.mark.full)])
def test_a_model_that_is_made_here_is_made_before_it_is_evaluated(
    evaluation: Evaluation, name: str
) -> None:
    make_model(Path("made"))
    words = ["--model", "plain", "--baseline", name, "--task", "arithmetic"]
    assert evaluation.run(*words) == 0
    assert "model       ready after" in evaluation.shown.out
    lines = evaluation.log("vllm-server")
    assert [line.split()[1] for line in lines if "--model" in line] == ["made", "plain"]


FLAT = """
task: [gsm8k]
data: rows
max-completion-tokens: 32
steps: 3
seq-len: 100
trainer: {lr: 1}
env: {columns: {prompt: question}, temperature: 0.5}
"""
IN_SECTIONS = """
model: {name: tiny}
task: {name: [gsm8k], data: rows, columns: {prompt: question}, mixture: [], held-out: null}
sampling: {max-completion-tokens: 32, seq-len: 100, temperature: 0.5}
optim: {lr: 1}
"""


@pytest.mark.parametrize("config", [FLAT, IN_SECTIONS], ids=["flat", "sections"])
def test_without_a_task_the_options_of_the_run_apply(
    evaluation: Evaluation, capsys: pytest.CaptureFixture[str], config: str
) -> None:
    make_model(Path("run/checkpoints/trained"))
    Path("run/config.yaml").write_text(config)
    Path("latest").symlink_to("run")
    assert evaluation.run("--model", "latest/checkpoints/trained", "--env.weight", "2") == 0
    asked = evaluation.log("evaluate")[0]
    assert asked.startswith("gsm8k evaluate --model latest/checkpoints/trained")
    for words in (
        *("--data rows", "--max-completion-tokens 32", "--seq-len 512", "--weight 2.0"),
        '--columns {"prompt": "question"}',
    ):
        assert words in asked
    assert "--temperature 0.5" not in asked
    told = "task and options of the environment: those of latest/config.yaml\n"
    assert capsys.readouterr().err == f"grpo-eval: {told}"
    assert settings("--model", "latest/checkpoints/trained", "--task", "math").data is None


@pytest.mark.parametrize(
    ("task", "told"),
    [
        (
            "arithmetic,broken:task",
            "env-server: DataUnusable: rows.jsonl line 3: the row is not JSON; see eval/l",
        ),
        (
            "silent:task",
            "env-server silent:task evaluate wrote no results; see eval/logs/evaluate.log",
        ),
    ],
)
def test_a_failure_is_named_in_one_line(evaluation: Evaluation, task: str, told: str) -> None:
    assert evaluation.run("--model", "plain", "--task", task) == 1
    assert evaluation.shown.err.startswith(f"failed (EvaluationFailed): {told}")
    assert evaluation.shown.err.count("\n") == 1
    assert Path("eval.jsonl").exists() is ("arithmetic" in task), "earlier results are kept"


def test_a_signal_ends_every_process(evaluation: Evaluation) -> None:
    assert evaluation.run("--model", "plain", "--task", "stopped:task") == 130
    assert "stopped by SIGINT; every process of this evaluation has ended" in evaluation.shown.err


@pytest.mark.usefixtures("evaluation")
def test_sections_of_a_file_are_options_of_services() -> None:
    lines = ("model: plain", "task: math", "env.weight: 3", "env: {data: null, eval-requests: 2}")
    server = "server: {await-weights: false, block-size: 32, stop: [a, b]}"
    Path("eval.yaml").write_text("\n".join([*lines, server]))
    found = settings("--config", "eval.yaml", "--env.weight", "4")
    environment, server_values = found.environment("math", "plain"), found.server("plain")
    assert [environment[name] for name in ("eval_requests", "weight")] == [2, 4.0]
    assert server_values["await_weights"] is False
    assert server_values["engine_arguments"] == ("--block-size=32", "--stop", "a", "b")


MISTAKES = {
    "--model plain": "--task: name the task, for example --task gsm8k",
    "--model ./none MATH": "--model: no such directory: ./none",
    "--model plain MATH --baseline base": "--baseline: plain is no adapter, so it has no base",
    "--model plain MATH --base-model plain": "--base-model: plain is no adapter; omit",
    "--model plain MATH --greedy --samples 4": "--samples: --greedy samples one answer to",
    "--model plain MATH --samples 4 --ks 1,8": "--ks: expected at most 4, the number",
    "--model plain MATH --output results": "--output: expected a suffix, as in results.jsonl",
    "--model plain MATH --output /proc/1/e.jsonl": "cannot write to /proc",
    "--model plain --task math,gsm9k": "--task gsm9k: no task 'gsm9k'; expected one of arithmetic",
    "--model plain MATH --data ./rows": "--data: no such directory: ./rows",
    "--model plain MATH --max-completion-tokens 512": "--max-completion-tokens: a prompt and 512",
    "--model plain MATH --server.port 3": "--server.port: grpo-eval sets this option itself",
    "--model plain MATH --server.drain-s x": "--server.drain-s: expected a number, at least 0; g",
    "--model plain MATH --server.drian-s 1": "--server.drian-s: no such option; did you mean --se",
    "--model plain MATH --server.logprobs-mode raw": "--logprobs-mode: vllm-api-server sets",
    "--model plain MATH --trainer.lr 3": "--trainer.lr: no such option",
    "--model plain MATH --env.eval-items 3": "--env.eval-items: grpo-eval sets this option; wr",
    "--model plain MATH --env.weight x": "--env.weight: expected a number, at least 0 and at most",
    "--model plain MATH --env.reward-wieghts length=1": "--env.reward-wieghts: no such option; did "
    "you mean --env.reward-weights or --env.reward-workers?",
    "--model plain MATH --env.group-size 1": "pass 2 or more, or --no-drop-equal-scores",
    "--model plain --task mixture": "--mixture: the task mixture needs tasks and weights",
    "--model plain MATH --env.weight=1 word": "'word': unexpected; every option begins with --",
    "--config bad.yaml": "bad.yaml:1: env: no such option",
    "--model no-base MATH": "--model: no-base/adapter_config.json names no base_model_name_or_",
    "--model lost-base MATH": "the base model of lost-base: no such directory: /none/model",
    "--model large MATH --base-model plain": "the adapter has rank 1024, and vLLM serves at mo",
}


@pytest.mark.usefixtures("evaluation")
def test_a_mistake_ends_with_status_2_before_a_server_starts(mistake: Mistake) -> None:
    Path("bad.yaml").write_text("env: 3")
    make_adapter(Path("no-base"), None)
    make_adapter(Path("lost-base"), Path("/none/model"))
    make_adapter(Path("large"), None, rank=1024)
    for arguments, problem in MISTAKES.items():
        assert problem in mistake(evaluate, arguments.replace("MATH", "--task math")), arguments
