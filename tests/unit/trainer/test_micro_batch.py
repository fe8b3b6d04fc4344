"""The tokens of a micro-batch on a GPU: chosen by its memory, recorded, and kept by a resumed run.

The GPU is this machine's CPU, with a memory of a chosen size."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from structlog.testing import capture_logs
from torch import Tensor

from grpo_core.provenance.chain import Provenance
from grpo_core.provenance.records import Start
from grpo_core.tree.trainer import TrainerSettings
from grpo_runs.offline.local import WeightsInProcess
from grpo_trainer.checkpoint.store import RECORD
from grpo_trainer.checks.self_test import SelfTest
from grpo_trainer.memory_plan import (
    GIB,
    MARGIN,
    MemoryBudget,
    chosen_plan,
    memory_plan,
    with_micro_batch,
)
from grpo_trainer.ranks import ALONE, Ranks
from grpo_trainer.roles import Lead
from grpo_trainer.stop import Stop
from grpo_trainer.train import open_run, training_steps
from tests.unit.trainer.ranks.test_loop import Queue, settings_of
from tests.unit.trainer.tiny_policy import model_directory

GPU = MemoryBudget(True, "a GPU", 80 * GIB, GIB, 2 * GIB)


@dataclass
class Run:
    """A run that goes on for one step at each call, on a GPU of the chosen size."""

    model: Path
    save_path: Path
    steps: int = 0

    def go_on(self, gpu_bytes: int) -> tuple[int, list[Any]]:
        """Returns the tokens of a micro-batch, and the lines about them."""
        self.steps += 1
        given = {"tokens_per_micro_batch": None, "state_interval": 1}
        settings = settings_of(self.model, self.save_path, self.steps, given)
        budget = replace(GPU, total_bytes=gpu_bytes)

        @contextlib.contextmanager
        def weights(settings: TrainerSettings) -> Iterator[WeightsInProcess]:
            yield WeightsInProcess(settings, samples=True)

        queue: Any = Queue(full_before=())
        with pytest.MonkeyPatch.context() as patch, capture_logs() as lines:
            patch.setattr(MemoryBudget, "find", lambda _: budget)
            patch.setattr(SelfTest, "require", lambda _: None)
            with open_run(settings, queue, weights) as opened:
                assert opened is not None
                lead, position = opened
                assert isinstance(lead, Lead)
                for _ in training_steps(lead, position, Stop()):
                    pass
                used = lead.batches.settings.micro_batch_tokens
        return used, [line for line in lines if line["event"] == "micro_batch.chosen"]

    @property
    def record(self) -> Path:
        return max((self.save_path / "trainer_state").glob(f"*/{RECORD}"))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(model_directory(tmp_path / "model"), tmp_path / "run")


@pytest.fixture
def holding(run: Run) -> Callable[..., int]:
    """The least memory of a GPU that holds micro-batches of so many tokens, and a server unless
    the GPU is not shared."""

    def gpu_bytes(tokens: int, *, is_shared: bool = True, ranks: int = 1, **options: Any) -> int:
        given = {"tokens_per_micro_batch": tokens, **options}
        settings = settings_of(run.model, run.save_path, 1, given)
        plan = memory_plan(settings)
        of_gpu = chosen_plan(settings, plan.policy, replace(GPU, ranks=ranks))
        needed = of_gpu.trainer_bytes(False) + MARGIN * of_gpu.working_bytes[False]
        return int(needed / (1 - is_shared * settings.gpu_memory_utilization)) + 1

    return gpu_bytes


def test_a_resumed_run_keeps_the_recorded_number_unless_it_no_longer_fits(
    run: Run, holding: Callable[..., int]
) -> None:
    used, (line,) = run.go_on(holding(8192))
    assert (used, line["tokens"]) == (8192, 8192)
    assert run.go_on(holding(16_384))[0] == 8192
    used, (line,) = run.go_on(holding(8192) - 2)
    assert (used, line["tokens"], line["checkpoint_tokens"]) == (4096, 4096, 8192)
    record = json.loads(run.record.read_text())
    assert record.pop("tokens_per_micro_batch") == 4096
    run.record.write_text(json.dumps(record))  # a former version's: --batch-size times --seq-len
    assert run.go_on(holding(8192))[0] == 128
    starts = [line for line in Provenance.of(run.save_path).lines if isinstance(line, Start)]
    recorded = [yaml.safe_load(start.config)["tokens-per-micro-batch"] for start in starts]
    assert recorded == [8192, 8192, 4096, 128]


@dataclass(frozen=True)
class Two(Ranks):
    """Two ranks. Args: other_bytes: of the other one's GPU"""

    count: int = 2
    other_bytes: int = 0

    def maximum(self, tensor: Tensor) -> Tensor:
        return torch.maximum(
            tensor, -torch.tensor([self.other_bytes, math.inf], dtype=torch.float64)
        )


def test_the_number_is_chosen_on_gpus_unless_the_user_names_it(
    run: Run, holding: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(machine: MemoryBudget, ranks: Ranks = ALONE, **options: Any) -> int | None:
        monkeypatch.setattr(MemoryBudget, "find", lambda _: machine)
        given = {"tokens_per_micro_batch": None, **options}
        settings = settings_of(run.model, run.save_path, 1, given)
        policy = memory_plan(settings).policy
        return with_micro_batch(settings, policy, ranks, None).tokens_per_micro_batch

    assert chosen(GPU) == 32_768
    assert chosen(GPU, seq_len=40_000) == 40_000
    assert chosen(replace(GPU, total_bytes=holding(8192)), seq_len=5000) == 8192
    with capture_logs() as lines:
        assert chosen(replace(GPU, total_bytes=GIB)) == 4096
    assert "may not fit" in lines[0]["hint"]
    assert chosen(GPU, tokens_per_micro_batch=20) == 20
    # The GPU with the least memory decides. None of it is the server's, which has its own.
    least = holding(8192, is_shared=False)
    larger, smaller = (replace(GPU, total_bytes=n) for n in (80 * GIB, least))
    assert chosen(larger, ranks=Two(other_bytes=least)) == 8192
    assert chosen(smaller, ranks=Two(other_bytes=80 * GIB)) == 8192
    assert chosen(smaller, ranks=Two(other_bytes=least - 1)) == 4096
    divided = {"mode": "none", "fsdp": True}
    least = holding(8192, is_shared=False, ranks=2, **divided)
    assert chosen(larger, ranks=Two(other_bytes=least), **divided) == 8192
    assert chosen(larger, ranks=Two(other_bytes=least - 2), **divided) == 4096
    assert chosen(replace(GPU, is_gpu=False)) is None
