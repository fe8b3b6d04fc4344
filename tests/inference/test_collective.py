"""A trainer and real servers in one process group: --weight-transport collective."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from structlog.typing import EventDict

from grpo_core.tree.trainer_command import CommandLine
from grpo_trainer.model.adapter import trained_parameters
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.weight_sync.base import Published
from grpo_trainer.weight_sync.build import build_weight_sync
from grpo_trainer.weight_sync.collective import CollectiveDirectories
from grpo_trainer.weight_sync.files import FileSync
from tests.fixtures.inference import (
    FILE_DTYPE,
    InferenceServer,
    loads_in_place,
    start_inference,
    stop_inference,
)

pytestmark = pytest.mark.skipif(not loads_in_place(), reason="the engine restarts instead")

TWO_WORKERS = ("--tensor-parallel-size", "2")
WAIT_S = 60.0


@dataclass
class Trainer:
    """One that takes steps on random gradients. Every publication of a `FileSync` checks that a
    server samples with the new weights."""

    sync: FileSync
    optimizer: MasterOptimizer
    steps: int = 0

    def step(self) -> Published:
        for parameter in trained_parameters(self.sync._policy).values():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step(self.steps)
        self.steps += 1
        return self.sync.publish(self.optimizer, self.steps)

    @property
    def directories(self) -> CollectiveDirectories:
        assert isinstance(self.sync.directories, CollectiveDirectories)
        return self.sync.directories


@dataclass
class Run:
    """Servers and trainers of one run."""

    model: Path
    redis_url: str
    directory: Path
    stack: ExitStack
    flags: tuple[str, ...] = ()
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    servers: dict[str, InferenceServer] = field(default_factory=dict)

    def serve(self, name: str, *flags: str) -> InferenceServer:
        (directory := self.directory / name).mkdir(exist_ok=True)
        server = start_inference(
            self.model,
            directory,
            *("--dtype", FILE_DTYPE, "--redis-url", self.redis_url, "--run-id", self.run_id),
            *("--server-name", name, "--weights-dir", str(directory / "own")),
            *("--staging-dir", str(directory / "staging"), *self.flags, *flags),
            shares=False,
        )
        self.servers[name] = server
        self.stack.callback(stop_inference, server)
        return server

    def train(self, mode: str = "none", **options: Any) -> Trainer:
        given = {
            **{"mode": mode, "model": str(self.model), "weight_transport": "collective"},
            **{"redis_url": self.redis_url, "run_id": self.run_id, "steps": 100},
            **{"save_path": self.directory / "run", "publish_wait_s": WAIT_S, "lr": 1e-2},
            "inference_url": next(iter(self.servers.values())).url,
        }
        sync = build_weight_sync(CommandLine(**given | options).settings())
        assert isinstance(sync, FileSync)
        self.stack.enter_context(closing(sync))
        policy = sync.load_policy()
        torch.manual_seed(0)
        masters = trained_parameters(policy).values()
        trainer = Trainer(sync, MasterOptimizer(masters, lambda _: 1e-2, 0.0, 1.0))
        sync.start(trainer.optimizer, 0)
        return trainer

    def files(self) -> list[str]:
        """Versions that the trainer wrote as files."""
        return sorted(path.name for path in (self.directory / "run" / "served_weights").iterdir())

    def served(self, name: str) -> tuple[int, int]:
        status = self.servers[name].status()
        return status["epoch"], status["step"]


@pytest.fixture
def run(tiny_model: Path, redis_url: str, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    with ExitStack() as stack:
        yield lambda *flags: Run(tiny_model, redis_url, tmp_path, stack, flags)


def of(logs: list[EventDict], event: str) -> list[EventDict]:
    return [entry for entry in logs if entry["event"] == event]


def test_one_server_gets_every_version_without_files(run: Callable[..., Run]) -> None:
    made = run()
    server = made.serve("a")
    engine = server.status()["engine_pid"]
    trainer = made.train()
    with capture_logs() as logs:
        for _ in range(3):
            published = trainer.step()
    assert published.reach is not None
    assert published.reach.incidents.by_files == 0
    assert len(of(logs, "weights.sent")) == 3
    assert len(of(logs, "transfer_group.formed")) == 1
    assert made.files() == []
    assert made.served("a") == (1, 3)
    assert server.status()["engine_pid"] == engine


def test_adapters_take_the_same_way(run: Callable[..., Run]) -> None:
    made = run("--enable-lora")
    made.serve("a")
    trainer = made.train("lora_only")
    with capture_logs() as logs:
        for _ in range(2):
            trainer.step()
    assert len(of(logs, "weights.sent")) == 2
    assert made.files() == []
    assert made.served("a") == (1, 2)
