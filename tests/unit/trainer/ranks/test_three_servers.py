"""Two real processes publish a policy to three servers, by files or through a process group. If
they divide it (FSDP2), both take part in collecting the weights; rank 0 alone writes or sends,
announces and checks them."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from redis import Redis
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from grpo_core.clients.inference import BridgeInfo, Completion
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.weights.collective import ARRIVING, GroupAddress, group_key
from grpo_core.weights.version_log import VersionLog
from grpo_core.weights.versions import (
    MANIFEST,
    Announcement,
    Manifest,
    VersionKind,
    sha256_of,
    version_id,
)
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.stop import Stop
from grpo_trainer.train import open_run, training_steps
from grpo_trainer.weight_sync.collective import CollectiveDirectories
from grpo_trainer.weight_sync.directories import VersionDirectories
from grpo_trainer.weight_sync.files import FileSync
from grpo_trainer.weight_sync.servers import Publisher, ServerWatch
from grpo_trainer.weight_sync.source import WeightSource
from grpo_vllm.engine.vllm_compat.collective import Receiver
from tests.support.forked import forked
from tests.support.wait import DEADLINE_S
from tests.unit.trainer.ranks.rank_rig import DEADLINE_S as RANK_DEADLINE_S
from tests.unit.trainer.ranks.rank_rig import met
from tests.unit.trainer.ranks.test_loop import Queue, settings_of
from tests.unit.trainer.served_model import ServedModel
from tests.unit.trainer.server_stand_in import StandIn
from tests.unit.trainer.tiny_policy import model_directory

NAMES = ("a", "b", "c")
STEPS = 3
FILES, COLLECTIVE = "files", "collective"


@dataclass
class EngineOf:
    """The engine of a server that the test's own process shows in Redis. It computes with the
    copy of the version that is shown."""

    name: str
    model: Path
    place: Path
    transport: str
    versions: VersionLog

    @property
    def base_url(self) -> str:
        return f"http://{self.name}"

    def _engine(self) -> ServedModel:
        (shown,) = [one for one in self.versions.servers() if one.name == self.name]
        directory = copy_at(self.place, self.transport, self.name, shown.version)
        # The untrained model has no directory.
        place = directory if directory.is_dir() else self.model
        loaded = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
        return ServedModel(loaded, shown.version)

    def info(self) -> BridgeInfo:
        return BridgeInfo(
            policy_version=PolicyVersion(0, 0),
            paused=False,
            weights_intact=True,
            weights_socket=None,
            dtype="float32",
            run_id=self.versions.run_id,
            name=self.name,
        )

    def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        return self._engine().served_logprobs(token_ids)

    def sample(self, prompt_token_ids: list[int], max_tokens: int, **_: Any) -> Completion:
        return self._engine().sample(prompt_token_ids, max_tokens)

    def close(self) -> None:
        """Nothing to close."""


def copy_at(place: Path, transport: str, server: str, version: PolicyVersion) -> Path:
    """Where a server has the version."""
    if transport == FILES:
        return place / "served" / version_id(version)
    return place / server / (version_id(version) + ARRIVING)


def _work(
    rank: int, transport: str, fsdp: bool, model: Path, place: Path, url: str, run_id: str
) -> None:
    torch.set_num_threads(1)

    @contextlib.contextmanager
    def weights(settings: TrainerSettings) -> Iterator[FileSync]:
        assert rank == 0, "one process announces"
        root = place / "served"
        versions = VersionLog(url, run_id, DEADLINE_S)
        watch = ServerWatch(versions, DEADLINE_S)
        servers: Any = {
            f"http://{name}": EngineOf(name, model, place, transport, versions) for name in NAMES
        }
        directories = VersionDirectories(root, with_deltas=True)
        if transport == COLLECTIVE:
            directories = CollectiveDirectories(root, watch, "localhost", DEADLINE_S)
        sync = FileSync(
            bridge=servers["http://a"],
            connect=servers.__getitem__,
            watch=watch,
            publisher=Publisher(watch, DEADLINE_S, DEADLINE_S),
            source=WeightSource(root, None, 0, None),
            restarts=False,
            nodes=len(NAMES),
            weights=TrainedWeights(settings.model),
            directories=directories,
            dtype="float32",
            device="cpu",
            every_steps=1,
            last_step=settings.steps,
        )
        with contextlib.closing(sync):
            yield sync

    queue: Any = Queue()
    settings = settings_of(model, place, STEPS, {"fsdp": fsdp, "run_id": run_id})
    ranks = met(rank, (place / "meeting").as_uri())
    with open_run(settings, queue, weights, ranks) as opened:
        assert opened is not None
        steps = [position.step for position in training_steps(*opened, Stop())]
        assert steps[-1] == STEPS
    os._exit(0)


@contextlib.contextmanager
def joining(url: str, run_id: str, place: Path) -> Iterator[None]:
    """The worker of each server joins every group that the trainer forms."""
    redis: Redis = Redis.from_url(url, decode_responses=True)
    over, receivers = threading.Event(), list[Receiver]()

    def join() -> None:
        known = None
        while not over.wait(0.01):
            told: Any = redis.get(group_key(run_id))
            if told != known:
                known, address = told, GroupAddress.model_validate_json(told)
                for name, (_, rank) in address.servers.items():
                    here = place / name
                    receivers.append(Receiver(address, rank, 0, 1, here, torch.device("cpu")))
                    receivers[-1].start()

    (thread := threading.Thread(target=join)).start()
    yield
    over.set()
    thread.join()
    for receiver in receivers:
        receiver.leave()
        receiver.join()
    redis.close()


@pytest.mark.parametrize(
    ("transport", "fsdp"),
    [
        pytest.param(FILES, True, marks=pytest.mark.full),
        (COLLECTIVE, True),
        pytest.param(COLLECTIVE, False, marks=pytest.mark.full),
    ],
)
def test_two_ranks_publish_to_three_servers(
    transport: str, fsdp: bool, redis_url: str, tmp_path: Path
) -> None:
    model, run_id = model_directory(tmp_path / "model"), uuid.uuid4().hex[:8]
    run = tmp_path / "run"
    run.mkdir()
    with contextlib.ExitStack() as stack:
        stack.enter_context(joining(redis_url, run_id, run))
        joins: Any = {"workers": 1, "engine_pid": 1}
        servers = [stack.enter_context(StandIn(redis_url, run_id, name, **joins)) for name in NAMES]
        processes = [
            forked().Process(
                target=_work, args=(rank, transport, fsdp, model, run, redis_url, run_id)
            )
            for rank in (0, 1)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(RANK_DEADLINE_S)
            process.kill()
        assert [process.exitcode for process in processes] == [0, 0]
        for server in servers:
            assert [one.id for one in server.seen] == ["1-0", "1-1", "1-2", "1-3"]
    kinds = [one.kind for one in servers[0].seen]
    assert kinds == [VersionKind.BASE, *[VersionKind.FULL] * STEPS]
    last: Announcement = servers[0].seen[-1]
    for name in NAMES:
        served = copy_at(run, transport, name, last.version)
        assert sha256_of((served / MANIFEST).read_bytes()) == last.manifest_sha256
    assert Manifest.of(served).digest == last.digest
    assert any((run / "served").iterdir()) == (transport == FILES)
    final = load_file(run / "final_model" / "model.safetensors")
    published = load_file(served / "model.safetensors")
    assert published.keys() == final.keys()
    assert all(torch.equal(published[name], final[name]) for name in final)
    before = load_file(model / "model.safetensors")
    # Rank 0 holds the first rows of a matrix, and rank 1 the last ones: both have arrived.
    name = next(name for name, tensor in before.items() if "q_proj.weight" in name)
    for row in (0, -1):
        assert not torch.equal(published[name][row], before[name][row])
