"""A trainer and real servers in one process group: --weight-transport collective."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from structlog.testing import capture_logs
from structlog.typing import EventDict

from grpo_core.clients.inference import BridgeClient
from grpo_core.tree.trainer_command import CommandLine
from grpo_trainer.model.adapter import trained_parameters
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.weight_sync import collective
from grpo_trainer.weight_sync.base import Published
from grpo_trainer.weight_sync.build import build_weight_sync
from grpo_trainer.weight_sync.files import FileSync
from tests.fixtures.health import is_healthy
from tests.fixtures.inference import (
    FILE_DTYPE,
    START_DEADLINE_S,
    InferenceServer,
    launch_inference,
    loads_in_place,
    stop_inference,
)
from tests.support.wait import wait_for

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

    def serve(self, name: str) -> InferenceServer:
        server = self.serve_in_background(name)
        server.process.wait_until(lambda: is_healthy(server.url), START_DEADLINE_S)
        return server

    def serve_in_background(self, name: str) -> InferenceServer:
        (directory := self.directory / name).mkdir(exist_ok=True)
        server = launch_inference(
            self.model,
            directory,
            *("--dtype", FILE_DTYPE, "--redis-url", self.redis_url, "--run-id", self.run_id),
            *("--server-name", name, "--weights-dir", str(directory / "own")),
            *("--staging-dir", str(directory / "staging"), *self.flags),
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
        }
        if self.servers:
            given["inference_url"] = next(iter(self.servers.values())).url
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


@pytest.mark.full
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


@pytest.mark.full
@pytest.mark.parametrize("flags", [(), TWO_WORKERS], ids=["one worker", "two workers"])
def test_a_server_that_joins_late_takes_the_version_from_another_one(
    flags: tuple[str, ...], run: Callable[..., Run]
) -> None:
    made = run(*flags)
    made.serve("a")
    made.serve("b")
    trainer = made.train(num_inference_nodes=2, master_addr="127.0.0.1")
    trainer.step()
    assert {made.served(name) for name in "ab"} == {(1, 1)}
    made.serve("late")
    assert made.served("late") == (1, 1)
    with capture_logs() as logs:
        published = trainer.step()
    assert published.reach is not None
    assert published.reach.servers == 3
    assert of(logs, "transfer_group.formed")[0]["members"] == ["a", "b", "late"]
    assert {made.served(name) for name in made.servers} == {(1, 2)}
    assert made.files() == []


def kill_a_worker(server: InferenceServer) -> None:
    engine = psutil.Process(server.status()["engine_pid"])
    kill(engine.children(recursive=True)[-1])  # the youngest


def kill_the_server(server: InferenceServer) -> None:
    kill(psutil.Process(server.process.pid))


def kill(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, bool)


@pytest.mark.full
@pytest.mark.parametrize("killed", [kill_a_worker, kill_the_server])
def test_the_others_serve_on_when_one_dies_in_a_transfer(
    killed: Callable[[InferenceServer], None],
    run: Callable[..., Run],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = run(*TWO_WORKERS)
    victim, other = made.serve("a"), made.serve("b")
    trainer = made.train(num_inference_nodes=2, master_addr="127.0.0.1")
    trainer.step()
    tokens = list(range(5, 40))
    with BridgeClient(other.url) as bridge:
        before = bridge.prompt_logprobs(tokens)
        meanwhile: list[list[float]] = []

        def in_mid_transfer() -> None:
            killed(victim)
            meanwhile.append(bridge.prompt_logprobs(tokens))

        with interrupted(in_mid_transfer, monkeypatch), capture_logs() as logs:
            published = trainer.step()
        assert meanwhile == [before]
        assert bridge.prompt_logprobs(tokens) != before
    assert published.reach is not None
    assert published.reach.incidents.by_files == 1
    assert len(of(logs, "weights.by_files")) == 1
    assert made.served("b") == (1, 2)
    if killed is kill_the_server:
        stop_inference(victim)
        made.serve("a")
    wait_for(lambda: made.served("a"), lambda version: version == (1, 2), START_DEADLINE_S)
    with capture_logs() as logs:
        trainer.step()
    assert of(logs, "weights.sent")[0]["servers"] == ["a", "b"]
    assert {made.served(name) for name in "ab"} == {(1, 3)}


@contextmanager
def interrupted(act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The first transfer inside the context is interrupted before its second bucket."""
    buckets, numbers = collective._buckets, itertools.count()

    def counted(*given: Any) -> Iterator[torch.Tensor]:
        for bucket in buckets(*given):
            if next(numbers) == 1:
                act()
            yield bucket

    with monkeypatch.context() as patch:
        patch.setattr(collective, "_buckets", counted)
        yield


@pytest.mark.full
def test_a_server_that_returns_alone_gets_files(run: Callable[..., Run]) -> None:
    made = run()
    server = made.serve("a")
    # Found in Redis: it returns on another port.
    trainer = made.train(vllm_restart_interval=2, num_inference_nodes=1, master_addr="127.0.0.1")
    for _ in range(3):  # the last step is not published
        trainer.step()
    kill_the_server(server)
    stop_inference(server)
    returned = made.serve_in_background("a")

    def recovered() -> bool:
        """As the trainer does again and again while it waits for a batch."""
        trainer.sync.recover_server()
        return is_healthy(returned.url)

    wait_for(recovered, bool, START_DEADLINE_S)
    assert made.served("a") == (1, 3)
    assert made.files() == ["1-3"]
    with capture_logs() as logs:
        trainer.step()
    assert len(of(logs, "weights.sent")) == 1
    assert made.served("a") == (1, 4)


def train_until_killed(model: Path, redis_url: str, directory: Path, run_id: str, url: str) -> None:
    """In a process of its own, which dies in its second transfer."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        trainer = Run(model, redis_url, directory, stack, run_id=run_id).train(inference_url=url)
        trainer.step()
        with interrupted(lambda: os.kill(os.getpid(), signal.SIGKILL), patch):
            trainer.step()


@pytest.mark.full
def test_servers_serve_on_when_the_trainer_dies_in_a_transfer(run: Callable[..., Run]) -> None:
    made = run()
    server = made.serve("a")
    given = (made.model, made.redis_url, made.directory, made.run_id, server.url)
    dying = multiprocessing.get_context("spawn").Process(target=train_until_killed, args=given)
    dying.start()
    dying.join()
    assert dying.exitcode == -signal.SIGKILL
    assert made.served("a") == (1, 1)
    successor = made.train()
    with capture_logs() as logs:
        successor.step()
    assert len(of(logs, "weights.sent")) == 1
    assert made.served("a") == (2, 1)
    assert server.status()["crashes"] == 0
