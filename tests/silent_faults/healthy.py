"""Takes 10,000 healthy steps with real servers, and counts every warning and error of the trainer.

Writes the section "Healthy steps" of docs/reference/silent-faults.md. Settings that the log already
has are not run again.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from structlog.testing import capture_logs

from benchmarks.report import replace_section
from grpo_core.clients.inference import GenerateAnswer
from grpo_core.errors import GrpoError
from grpo_core.tree.weights import served_weights_directory
from grpo_core.wire.scored_group import RolloutFacts, ScoredGroup
from grpo_env.rollout.groups import TrainingSequence
from grpo_runs.process.ports import free_port
from grpo_trainer import train
from tests.fixtures.inference import start_inference, stop_inference
from tests.fixtures.run_api import start_run_api
from tests.silent_faults.exercise import CHAT, FLOAT32, GROUP_SIZE, TINY, subject_of
from tests.silent_faults.faults import LORA, SHARED
from tests.silent_faults.producer import SUMS, Producer
from tests.silent_faults.runs import KNOWN_WARNINGS, Site, lora_site, shared_site
from tests.support.redis_server import start_redis

SECTION = "Healthy steps"
FILES, RESTARTS = "none", "lora_restart"
TRUE_WARNINGS = KNOWN_WARNINGS | {"dtype.slow"}
"""The second one: this CPU has no instructions for bfloat16."""
EVENT, VALUE = re.compile(r"\[(info|warning|error) *\] (\S+)(.*)"), re.compile(r"(\w+)=(\S+)")
"""In a log file."""
LARGER_SUMS = [(a, b) for a in range(11, 99, 9) for b in range(12, 99, 9)]
"""For a pretrained model: in SmolLM2's groups, half of these have different scores at the start."""
MOST_TRIES = 20
"""Groups with equal scores are sampled anew, at most so often."""


@dataclass(frozen=True)
class Server:
    """What one inference server is started for."""

    mode: str = SHARED
    dtype: str = FLOAT32
    model: str = ""


@dataclass(frozen=True)
class Setting:
    """A run. `lag`: of its batches, or None as `grpo-run` has it; `states`: options of sampling,
    which the groups state; `learnable`: sums that are solved half the time are drawn most often;
    `options`: of the trainer."""

    steps: int
    lag: int | None = 0
    states: dict[str, float] = field(default_factory=dict)
    turns: int = 1
    learnable: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        words = ["grpo-run" if self.lag is None else f"{self.lag} batches old"]
        words += [f"{name} {value:g}" for name, value in self.states.items()]
        words += [f"{self.turns} turns"] * (self.turns > 1) + ["curriculum"] * self.learnable
        return ", ".join([*words, *(f"{k} {v}" for k, v in self.options.items())])


HOT, COLD = {"temperature": 1.2}, {"temperature": 0.6}
TOP_P = Setting(500, 1, {"top_p": 0.9}, options={"recompute_logprobs": True})
SETTINGS: dict[Server, tuple[Setting, ...]] = {
    Server(): (
        Setting(600),
        Setting(500, 1),
        Setting(500, 2, COLD),
        Setting(500, 4, HOT),
        Setting(600, 8),
        Setting(500, 8, COLD),
        Setting(500, 8, HOT),
        Setting(500, 8, options={"lr": 3e-4}),
        Setting(500, 2, turns=2),
        Setting(500, 4, learnable=True),
        TOP_P,
    ),
    Server(dtype="bfloat16"): (Setting(500), Setting(500, 8), Setting(300, 2, COLD)),
    Server(LORA): (Setting(500), Setting(500, 8), Setting(500, 4, COLD, learnable=True)),
    Server(LORA, "bfloat16"): (Setting(300, 2),),
    Server(FILES): (Setting(300), Setting(200, 8)),
    Server(RESTARTS): (Setting(300, None, options={"vllm_restart_interval": 50}),),
    Server(model="smollm2"): (Setting(100, learnable=True),),
    Server(dtype="bfloat16", model="smollm2"): (
        Setting(250, 8, learnable=True),
        Setting(250, 4, HOT, learnable=True),
        Setting(150, 0, HOT),
    ),
    Server(LORA, "bfloat16", "smollm2"): (Setting(250, 4, learnable=True),),
}


class HealthyProducer(Producer):
    """Samples as an environment that drops groups with equal scores."""

    setting: Setting

    def __post_init__(self) -> None:
        super().__post_init__()
        self._random = random.Random(0)
        is_tiny = self.exercise.question is TINY.question
        self._rates = dict.fromkeys(SUMS if is_tiny else LARGER_SUMS, 0.5)
        self._lock = threading.Lock()

    def _sample(self, _is_faulty: bool, _numbers: tuple[int, int]) -> ScoredGroup:
        for _ in range(MOST_TRIES):
            with self._lock:
                weights = [0.05 + rate * (1 - rate) for rate in self._rates.values()]
                [numbers] = self._random.choices([*self._rates], weights)
            group = self._group(numbers)
            rate = sum(group.scores) / GROUP_SIZE
            if self.setting.learnable:
                self._rates[numbers] += (rate - self._rates[numbers]) / 2
            if 0 < rate < 1:
                break
        return group

    def _group(self, numbers: tuple[int, int]) -> ScoredGroup:
        sequences = [TrainingSequence() for _ in range(GROUP_SIZE)]
        texts = []
        for turn in range(self.setting.turns):
            prompt = self._prompt(*numbers[:: -1 if turn else 1])
            same = turn == 0
            for sequence in sequences[:: GROUP_SIZE if same else 1]:
                answers = self._answers([*sequence.tokens, *prompt], GROUP_SIZE if same else 1)
                for one, answer in zip(sequences if same else [sequence], answers, strict=True):
                    one.add_prompt(prompt).add_completion(answer)
                    texts.append(answer.text)
        facts = RolloutFacts(policy_version=[(s.first_version, s.last_version) for s in sequences])
        limits = {"max_tokens": self.exercise.max_tokens}
        return ScoredGroup(
            tokens=[sequence.tokens for sequence in sequences],
            masks=[sequence.masks for sequence in sequences],
            inference_logprobs=[sequence.logprobs for sequence in sequences],
            scores=[float(self.exercise.is_right(numbers, t)) for t in texts[-GROUP_SIZE:]],
            generation_params={"temperature": 1.0} | limits | self.setting.states,
            group_overrides=facts.on_the_wire(),
        )

    def _answers(self, prompt: list[int], count: int) -> Sequence[Any]:
        body = {"prompt": {"prompt_token_ids": prompt}, "n": count, "logprobs": 0}
        body |= {"temperature": 1.0, "max_tokens": self.exercise.max_tokens} | self.setting.states
        answer = self._http.post(f"{self.server.url}/generate", json=body).raise_for_status()
        return GenerateAnswer.model_validate(answer.json()).completions()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.silent_faults.healthy")
    parser.add_argument("--log", type=Path, required=True, help="JSON lines, one for each setting")
    parser.add_argument("--commit", default="", help="what is measured, for the log")
    parser.add_argument("--share", type=float, default=1.0, help="of the steps of each setting")
    parser.add_argument("--mode", default="", help="of this mode alone")
    parser.add_argument("--model", default=None, help="of this model alone; tiny: ''")
    parser.add_argument("--dtype", default="", help="of this data type alone")
    parser.add_argument("--results", type=Path, help="page whose section is replaced")
    options = parser.parse_args()
    for server, settings in SETTINGS.items():
        left = [s for s in settings if _name(server, s) not in _logged(options.log)]
        is_chosen = options.mode in server.mode and options.model in (None, server.model)
        is_chosen &= options.dtype in server.dtype
        if not left or not is_chosen:
            continue
        with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
            run = (
                partial(_grpo_run, server)
                if server.mode == RESTARTS
                else partial(_run, stack.enter_context(_site(server, Path(directory))))
            )
            for setting in left:
                target = Path(directory) / "run"
                target.mkdir()
                found = {"name": _name(server, setting), "commit": options.commit}
                steps = max(1, round(options.share * setting.steps))
                found |= run(replace(setting, steps=steps), target)
                shutil.rmtree(target)
                with options.log.open("a") as log:
                    log.write(json.dumps(found) + "\n")
                sys.stderr.write(f"{found}\n")
    lines = table([*_logged(options.log).values()])
    sys.stdout.write("\n".join([*lines, ""]))
    if options.results is not None:
        replace_section(options.results, SECTION, lines)


def _name(server: Server, setting: Setting) -> str:
    of_server = ", ".join(filter(None, (server.model, f"`{server.mode}`", server.dtype)))
    return f"{of_server}, {setting.name}"


def _logged(log: Path) -> dict[str, dict[str, Any]]:
    lines = log.read_text().splitlines() if log.exists() else []
    return {found["name"]: found for found in map(json.loads, lines)}


@contextmanager
def _site(server: Server, directory: Path) -> Iterator[Site]:
    subject = subject_of(server.model, server.dtype)
    # Two groups of 8. With a higher rate, the tiny model solves all sums after some hundred steps.
    exercise = (
        replace(CHAT, groups_per_batch=2)
        if server.model
        else replace(TINY, groups_per_batch=2, lr=1e-4)
    )
    with ExitStack() as stack:
        port = free_port()
        redis = start_redis(port, directory)
        stack.callback(redis.stop)
        redis_url = f"redis://127.0.0.1:{port}/0"
        api = start_run_api(redis_url, directory)
        stack.callback(api.process.stop)
        if server.mode == LORA:
            adapters = lora_site(
                subject.model, redis_url, api.url, directory, exercise, server.dtype
            )
            yield stack.enter_context(adapters)
            return
        flags = ["--dtype", server.dtype, "--redis-url", redis_url, "--run-id", server.mode]
        if server.mode == SHARED:
            flags += exercise.server_flags
            started = start_inference(subject.model, directory, *flags)
            stack.callback(stop_inference, started)
            yield stack.enter_context(shared_site(started, api.url, exercise))
            return
        save_path = directory / "saved"
        weights = served_weights_directory(save_path)
        weights.mkdir(parents=True)
        flags += ["--weights-dir", str(weights)]
        started = start_inference(subject.model, directory, *flags, shares=False)
        stack.callback(stop_inference, started)
        of_files = {"mode": FILES, "save_path": save_path, "resume": "never"}
        of_files |= {"redis_url": redis_url, "vllm_restart_interval": 1}
        yield Site(started, api.url, of_files, lambda: None, exercise)


def _run(site: Site, setting: Setting, directory: Path) -> dict[str, Any]:
    site.restore()
    httpx.get(f"{site.api_url}/reset_data").raise_for_status()
    lag = setting.lag or 0
    producer = HealthyProducer(site.server, site.api_url, site.exercise, batches_late=lag)
    producer.setting = setting
    settings = site.settings(directory, steps=setting.steps, **setting.options)
    error = ""
    with capture_logs() as logs, producer.running():
        try:
            train.train(settings)
        except GrpoError as named:
            error = f"{type(named).__name__}: {named}"
    assert settings.metrics_file is not None
    return _found(settings.metrics_file, error, logs)


def _grpo_run(server: Server, setting: Setting, directory: Path) -> dict[str, Any]:
    """As users start it, with an environment and the trainer's own server."""
    command = [sys.executable, "-m", "grpo_runs", "--mode", server.mode, "--dtype", server.dtype]
    command += ["--steps", str(setting.steps), "--run-dir", str(directory), "--batch-size", "16"]
    for name, value in setting.options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    ended = subprocess.run(command, stdout=subprocess.DEVNULL)
    log = directory / "logs" / "trainer.log"
    logs = [
        {"log_level": level, "event": event} | dict(VALUE.findall(values))
        for level, event, values in EVENT.findall(log.read_text() if log.exists() else "")
    ]
    error = f"exit code {ended.returncode}" if ended.returncode else ""
    return _found(directory / "metrics.jsonl", error, logs)


def _found(metrics: Path, error: str, logs: Sequence[MutableMapping[str, Any]]) -> dict[str, Any]:
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    records = [json.loads(line) for line in lines]
    warned = [entry for entry in logs if entry["log_level"] not in ("info", "debug")]
    return {
        "steps": len(records),
        "lag": max((record.get("staleness/max", 0) for record in records), default=0),
        "error": error,
        "warnings": Counter(
            " ".join(filter(None, (w["event"], w.get("check"), w.get("metric"))))
            for w in warned
            if w["event"] not in TRUE_WARNINGS
        ),
        "texts": [str(entry) for entry in warned][:20],
        "abstained": {
            entry["check"]: entry["abstained"]
            for entry in logs
            if entry["event"] == "check.abstained"
        },
    }


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of markdown."""
    steps = sum(one["steps"] for one in found)
    alarms = sum(sum(one["warnings"].values()) + bool(one["error"]) for one in found)
    commits = ", ".join(dict.fromkeys(one["commit"] for one in found))
    planned = sum(setting.steps for settings in SETTINGS.values() for setting in settings)
    return [
        f"Runs without any fault, of two groups of 8 completions a step. Of {planned:,} steps in "
        f"{sum(map(len, SETTINGS.values()))} settings, `python -m tests.silent_faults.healthy` "
        f"has taken {steps:,} in {len(found)}, at commit {commits}: {alarms} warnings or errors.",
        "",
        "Groups with equal scores are sampled anew, as environments drop them. *Largest lag* is in "
        "steps. *Abstained* counts the batches that a check could not judge.",
        "",
        "| Setting | Steps | Largest lag | Warnings | Abstained |",
        "|---|---|---|---|---|",
        *("| " + " | ".join(_cells(one)) + " |" for one in found),
        "",
    ]


def _cells(one: dict[str, Any]) -> list[str]:
    warned = [f"{event} ({count})" for event, count in one["warnings"].items()]
    warned += [one["error"].partition("\n")[0]] * bool(one["error"])
    abstained = [f"`{name}` {count}" for name, count in one["abstained"].items()]
    return [
        one["name"],
        f"{one['steps']:,}",
        f"{one['lag']:g}",
        ", ".join(warned) or "none",
        ", ".join(abstained),
    ]


if __name__ == "__main__":
    main()
