"""Two real processes that divide a policy (FSDP2) publish it to three servers. Both take part in
collecting the weights; rank 0 alone writes, announces and checks them."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from grpo_core.clients.inference import BridgeInfo, Completion
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.weights.version_log import VersionLog
from grpo_core.weights.versions import Announcement, Manifest, VersionKind
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.stop import Stop
from grpo_trainer.train import open_run, training_steps
from grpo_trainer.weight_sync.directories import VersionDirectories
from grpo_trainer.weight_sync.files import FileSync
from grpo_trainer.weight_sync.servers import Publisher, ServerWatch
from grpo_trainer.weight_sync.source import WeightSource
from tests.support.forked import forked
from tests.support.wait import DEADLINE_S
from tests.unit.trainer.ranks.rank_rig import met
from tests.unit.trainer.ranks.test_loop import Queue, settings_of
from tests.unit.trainer.served_model import ServedModel
from tests.unit.trainer.server_stand_in import StandIn
from tests.unit.trainer.tiny_policy import model_directory

NAMES = ("a", "b", "c")
STEPS = 3


@dataclass
class EngineOf:
    """The engine of a server that the test's own process shows in Redis. It computes with the
    files of the version that is shown."""

    name: str
    model: Path
    root: Path
    versions: VersionLog

    @property
    def base_url(self) -> str:
        return f"http://{self.name}"

    def _engine(self) -> ServedModel:
        (shown,) = [one for one in self.versions.servers() if one.name == self.name]
        directory = self.root / f"{shown.epoch}-{shown.step}"
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


def _work(rank: int, model: Path, place: Path, url: str, run_id: str) -> None:
    torch.set_num_threads(1)

    @contextlib.contextmanager
    def weights(settings: TrainerSettings) -> Iterator[FileSync]:
        assert rank == 0, "one process announces"
        root = place / "served"
        versions = VersionLog(url, run_id, DEADLINE_S)
        watch = ServerWatch(versions, DEADLINE_S)
        servers: Any = {f"http://{name}": EngineOf(name, model, root, versions) for name in NAMES}
        sync = FileSync(
            bridge=servers["http://a"],
            connect=servers.__getitem__,
            watch=watch,
            publisher=Publisher(watch, DEADLINE_S, DEADLINE_S),
            source=WeightSource(root, None, 0, None),
            restarts=False,
            nodes=len(NAMES),
            weights=TrainedWeights(settings.model),
            directories=VersionDirectories(root, with_deltas=True),
            dtype="float32",
            device="cpu",
            every_steps=1,
            last_step=settings.steps,
        )
        with contextlib.closing(sync):
            yield sync

    queue: Any = Queue()
    settings = settings_of(model, place, STEPS, {"fsdp": True, "run_id": run_id})
    ranks = met(rank, (place / "meeting").as_uri())
    with open_run(settings, queue, weights, ranks) as opened:
        assert opened is not None
        steps = [position.step for position in training_steps(*opened, Stop())]
        assert steps[-1] == STEPS
    os._exit(0)


def test_two_ranks_publish_to_three_servers(redis_url: str, tmp_path: Path) -> None:
    model, run_id = model_directory(tmp_path / "model"), uuid.uuid4().hex[:8]
    run = tmp_path / "run"
    run.mkdir()
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(StandIn(redis_url, run_id, name)) for name in NAMES]
        processes = [
            forked().Process(target=_work, args=(rank, model, run, redis_url, run_id))
            for rank in (0, 1)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(DEADLINE_S)
            process.kill()
        assert [process.exitcode for process in processes] == [0, 0]
        for server in servers:
            assert [one.id for one in server.seen] == ["1-0", "1-1", "1-2", "1-3"]
    kinds = [one.kind for one in servers[0].seen]
    assert kinds == [VersionKind.BASE, *[VersionKind.FULL] * STEPS]
    last: Announcement = servers[0].seen[-1]
    served = run / "served" / last.id
    assert Manifest.of(served).digest == last.digest
    final = load_file(run / "final_model" / "model.safetensors")
    published = load_file(served / "model.safetensors")
    assert published.keys() == final.keys()
    assert all(torch.equal(published[name], final[name]) for name in final)
    before = load_file(model / "model.safetensors")
    # Rank 0 holds the first rows of a matrix, and rank 1 the last ones: both have arrived.
    name = next(name for name, tensor in before.items() if "q_proj.weight" in name)
    for row in (0, -1):
        assert not torch.equal(published[name][row], before[name][row])
