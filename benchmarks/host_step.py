"""How long a GPU would be idle in each training step because of the host's own work:

    sudo chrt -f 10 .venv/bin/python -m benchmarks.host_step

The real training loop trains a policy that costs nothing, and each step waits as long as a GPU
takes. A GPU is idle from the last wait of a step to the update, and from the publication to the
first launch of the next step. Threads of this process that run then count too, because they take
the interpreter from the loop: `chrt` keeps other processes of the machine out of that.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.report import host_facts, number, spread, table
from grpo_core.clients.run_api import TrainerClient
from grpo_core.logs import configure_logging
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.tree.trainer_command import CommandLine
from grpo_core.wire.fields import MASKED, PROMPT_LOGPROB
from grpo_core.wire.run_api import RunStatus
from grpo_runs.offline.local import WeightsInProcess
from grpo_trainer.data.batches import Position
from grpo_trainer.data.collate import MicroBatch
from grpo_trainer.model.logprobs import TokenValues
from grpo_trainer.model.policy import CausalLM
from grpo_trainer.optim.digests import WeightDigests
from grpo_trainer.roles import Lead
from grpo_trainer.stop import Stop
from grpo_trainer.train import open_run, training_steps
from grpo_trainer.weight_sync.base import Published

VOCABULARY, SEED = 151_936, 0
END_TOKEN, FIRST_TOKEN = 1, 3
WARM_UPS, STEPS = 2, 12
TO_UPDATE, TO_LAUNCH = "last wait to update", "publication to launch"
ABOVE_EVERY = 27
"""One in so many targets has a probability above it, as `model/forward` computes it."""


@dataclass(frozen=True)
class Work:
    """`lengths`: the shortest and the longest sequence. `device_s`: predicted for 0.5 billion
    weights on an H100."""

    groups: int
    lengths: tuple[int, int]
    prompt: int
    device_s: float
    group_size: int = 8

    def body(self, step: int) -> str:
        """run-api's answer: groups that were sampled by the weights one step older."""
        draw = random.Random(f"{SEED}/{step}")
        groups = [self._group(draw, step) for _ in range(self.groups)]
        under = [None] * self.groups
        return json.dumps({"batch_id": step + 1, "batch": groups, "received_under": under})

    def _group(self, draw: random.Random, step: int) -> dict[str, Any]:
        def tokens(count: int) -> list[int]:
            return [draw.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(count)]

        sizes = [draw.randint(*self.lengths) - self.prompt - 1 for _ in range(self.group_size)]
        prompt, completions = tokens(self.prompt), [[*tokens(n), END_TOKEN] for n in sizes]
        logged = [[-round(draw.expovariate(1), 6) for _ in row] for row in completions]
        return {
            "tokens": [prompt + row for row in completions],
            "masks": [[MASKED] * self.prompt + row for row in completions],
            "scores": [float(number % 2) for number in range(self.group_size)],
            "inference_logprobs": [[PROMPT_LOGPROB] * self.prompt + row for row in logged],
            "env_id": 0,
            "group_overrides": {"policy_version": [[[1, max(0, step - 1)]] * 2] * self.group_size},
        }


WORKS = {
    "16 sequences of 400 to 880 tokens": Work(2, (400, 880), 128, 0.140),
    "64 sequences of 2,048 tokens": Work(8, (2048, 2048), 256, 1.790),
}


class Queue(TrainerClient):
    """The next batch of run-api is always ready. Args: bodies: run-api's answers"""

    run_uuid = "run"

    def __init__(self, bodies: list[str]) -> None:
        super().__init__("http://127.0.0.1:1")
        self._bodies = bodies

    def status(self) -> RunStatus:
        return RunStatus(current_step=0, queue_size=0, run_uuid=self.run_uuid)

    def register(self, _: object) -> int:
        return 0

    def _asked_by_trainer(
        self, method: str, path: str, deadline_s: float | None = None, **query: float
    ) -> dict[str, Any]:
        del method, deadline_s
        return json.loads(self._bodies[int(query["after"])]) if path == "/batch" else {}


class Clock:
    """Takes the times of a run. Args: lead: its trainer, whose policy costs nothing afterwards"""

    def __init__(self, lead: Lead, device_s: float) -> None:
        self._device_s = device_s
        self._weight = next(p for p in lead.learner.policy.parameters() if p.requires_grad)
        self._began: float | None = None
        self._waited = self._published = 0.0
        self.times_s: dict[str, list[float]] = defaultdict(list)
        optimizer = lead.learner.optimizer
        self._norm, self._step = optimizer.gradient_norm, optimizer.step
        self._publish = lead.publish
        forward = replace(lead.learner.forward)
        object.__setattr__(forward, "_values", self._values)
        lead.learner = replace(lead.learner, forward=forward)
        optimizer.gradient_norm = self._awaited_norm  # type: ignore[method-assign]
        optimizer.step = self._timed_step  # type: ignore[method-assign]
        lead.publish = self._timed_publish  # type: ignore[method-assign]

    def _values(self, _: CausalLM, micro: MicroBatch) -> TokenValues:
        """Logprobs that are those of the groups, nearly: no check may fail."""
        now = time.perf_counter()
        if self._began is None:
            self._began = now
            self.times_s[TO_LAUNCH].append(now - self._published)
        row, column = micro.trained()
        noise = torch.randn(len(row), generator=torch.Generator().manual_seed(SEED))
        logp = micro.behaviour_logp[row, column] + 5e-5 * noise
        above = torch.full_like(logp, torch.nan)
        above[::ABOVE_EVERY] = 0.3
        zeros = torch.zeros(micro.targets.shape)
        values = (logp + 0 * self._weight.sum(), torch.ones_like(logp), above)
        return TokenValues(*(zeros.index_put((row, column), found) for found in values))

    def _awaited_norm(self, step: int) -> float:
        """Wait until the device would have computed the gradients."""
        found = self._norm(step)
        if self._began is not None:
            left_s = self._began + self._device_s - time.perf_counter()
            time.sleep(max(0.0, left_s))
            self._began, self._waited = None, time.perf_counter()
        return found

    def _timed_step(self, step: int) -> float:
        self.times_s[TO_UPDATE].append(time.perf_counter() - self._waited)
        return self._step(step)

    def _timed_publish(self, position: Position) -> Published:
        found = self._publish(position)
        self._published = time.perf_counter()
        return found


def measured(work: Work, directory: Path) -> dict[str, list[float]]:
    """Seconds of each step."""
    width = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": True}
    config = Qwen2Config(vocab_size=VOCABULARY, eos_token_id=END_TOKEN, **width, **heads)
    Qwen2ForCausalLM(config).save_pretrained(directory / "model")
    steps = WARM_UPS + STEPS
    options = {
        **{"model": str(directory / "model"), "save_path": str(directory / "run"), "mode": "none"},
        **{"device": "cpu", "dtype": "float32", "metrics_file": str(directory / "metrics.jsonl")},
        **{"steps": steps, "batch_size": work.groups, "tokens_per_micro_batch": 16_384},
        **{"gradient_accumulation_steps": work.group_size, "checkpoint_interval": 0},
    }
    settings = CommandLine.model_validate(options | {"state_interval": 0}).settings()

    @contextlib.contextmanager
    def weights(settings: TrainerSettings) -> Iterator[WeightsInProcess]:
        yield WeightsInProcess(settings, samples=True)

    with (
        patch.object(WeightDigests, "every_step", False),  # as on a GPU
        Queue([work.body(step) for step in range(steps + 1)]) as api,
        open_run(settings, api, weights) as opened,
    ):
        assert opened is not None
        lead, position = opened
        assert isinstance(lead, Lead)
        clock = Clock(lead, work.device_s)
        for _ in training_steps(lead, position, Stop()):
            pass
    return {name: times[WARM_UPS:-1] for name, times in clock.times_s.items()}


def main() -> int:
    torch.set_num_threads(1)
    configure_logging("trainer", "INFO")
    rows = [["", "device, ms", f"{TO_UPDATE}, ms", f"{TO_LAUNCH}, ms", "share of the step"]]
    for name, work in WORKS.items():
        with tempfile.TemporaryDirectory() as directory:
            times_s = measured(work, Path(directory))
        idle_s = sum(median(times) for times in times_s.values())
        share = number(100 * idle_s / (work.device_s + idle_s))
        parts = [spread([1e3 * one for one in times_s[part]]) for part in (TO_UPDATE, TO_LAUNCH)]
        rows.append([name, number(1e3 * work.device_s), *parts, f"{share} %"])
    sys.stdout.write("\n".join([*host_facts(), "", *table(rows), ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
