"""What a rank holds: its part of the state, and one parameter of a checkpoint at a time.

A group of one process: the rank's number alone decides whether it leads or follows.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_trainer.config.cli import CommandLine
from grpo_trainer.model.adapter import trained_parameters
from grpo_trainer.model.forward import build_forward_pass
from grpo_trainer.ranks import lead
from grpo_trainer.ranks.group import LEADER, Ranks, leave
from grpo_trainer.ranks.joint import Joint
from grpo_trainer.ranks.lead import build_joint
from grpo_trainer.ranks.sharding import Sharded, shard
from grpo_trainer.ranks.state import RankOptimizer
from tests.unit.trainer.forward_rig import qwen, ragged_batch

FOLLOWER = LEADER + 1


@pytest.fixture(autouse=True)
def _group(tmp_path: Path) -> Iterator[None]:
    meeting = (tmp_path / "meeting").as_uri()
    dist.init_process_group("gloo", init_method=meeting, world_size=1, rank=0)
    yield
    leave()


@dataclass(frozen=True)
class WatchedRanks(Ranks):
    """`alive`: how many of the received tensors existed at each exchange."""

    received: list[weakref.ref[Tensor]] = field(default_factory=list)
    alive: list[int] = field(default_factory=list)

    def from_leader(self, tensor: Tensor, what: str = "a tensor") -> Tensor:
        self.received.append(weakref.ref(tensor))
        self.alive.append(sum(one() is not None for one in self.received))
        return super().from_leader(tensor, what)


def stepped(ranks: Ranks, **options: Any) -> Joint:
    """A rank that has taken a step."""
    given = {"model": "m", "mode": "none", "world_size": 2, "optimizer": "adamw", **options}
    settings = CommandLine.model_validate(given).settings()
    policy = qwen()
    forward = build_forward_pass(policy, settings)
    joint = build_joint(ranks, policy, forward, settings, lambda *_: None)
    batch = ragged_batch(forward.layout.cut, 1000)
    joint.gradients(batch.micro_batches, settings.resolved_objective, 0)
    joint.optimizer.step(0)
    return joint


@pytest.mark.parametrize("fsdp", [False, True])
def test_a_checkpoint_is_loaded_one_parameter_at_a_time(fsdp: bool) -> None:
    ranks = WatchedRanks(1, LEADER, 60.0)
    joint = stepped(ranks, fsdp=fsdp)
    names = list(trained_parameters(joint.policy))
    saved = {path: tensor.clone() for path, tensor in joint.optimizer.tensors(names).items()}
    ranks.received.clear(), ranks.alive.clear()
    joint.optimizer.load_tensors(names, saved)
    kinds = len(saved) // len(names)
    assert len(ranks.alive) == 1 + len(saved)
    assert max(ranks.alive) <= 1 + kinds
    torch.testing.assert_close(joint.optimizer.tensors(names), saved)


@pytest.mark.parametrize(("index", "is_kept"), [(LEADER, True), (FOLLOWER, False)])
def test_the_leader_alone_keeps_the_whole_state(index: int, is_kept: bool) -> None:
    joint = stepped(Ranks(1, LEADER, 60.0), fsdp=True)
    optimizer = joint.optimizer
    assert isinstance(optimizer, RankOptimizer)
    optimizer._ranks = Ranks(1, index, 60.0)
    names = list(trained_parameters(joint.policy))
    assert bool(optimizer.tensors(names)) == is_kept


def test_the_logits_of_a_divided_model_exist_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused head calls the decoder; the model's own pass computes all logits at once."""

    def all_logits(*_: Any, **__: Any) -> None:
        raise AssertionError("all logits at once")

    def divided(policy: Any, ranks: Ranks) -> Sharded:
        found = shard(policy, ranks)
        found.policy.forward = all_logits
        return found

    monkeypatch.setattr(lead, "shard", divided)
    stepped(Ranks(1, LEADER, 60.0), fsdp=True)
