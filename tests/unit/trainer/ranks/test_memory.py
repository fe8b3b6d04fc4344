"""What a rank holds: its part of the state, and one parameter of a checkpoint at a time.

A group of one process: the rank's number alone decides whether it leads.
"""

from __future__ import annotations

import weakref
from collections import UserDict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from grpo_core.tree.trainer_command import CommandLine
from grpo_trainer.learner import accumulate_gradients
from grpo_trainer.model.adapter import trained_parameters
from grpo_trainer.model.division import Division
from grpo_trainer.model.forward import build_forward_pass
from grpo_trainer.model.loading import HOST
from grpo_trainer.optim.master_optimizer import build_optimizer
from grpo_trainer.optim.sharding import RankOptimizer
from grpo_trainer.ranks import LEADER, Orders, Ranks
from tests.unit.trainer.forward_rig import qwen, ragged_batch


@pytest.fixture(autouse=True)
def _group(tmp_path: Path) -> Iterator[None]:
    meeting = (tmp_path / "meeting").as_uri()
    dist.init_process_group("gloo", init_method=meeting, world_size=1, rank=0)
    yield
    dist.destroy_process_group()


def stepped(ranks: Ranks, **options: Any) -> RankOptimizer:
    """The optimizer of a rank that has taken a step."""
    given = {"model": "m", "mode": "none", "world_size": 2, "optimizer": "adamw", **options}
    settings = CommandLine.model_validate(given).settings()
    policy, orders = qwen(), Orders(ranks)
    # A group of one process, which would need neither.
    division = Division(policy, HOST, orders, "the policy") if settings.fsdp else None
    forward = build_forward_pass(policy, settings)
    optimizer = build_optimizer(policy, settings, partial(RankOptimizer, ranks, division))
    assert isinstance(optimizer, RankOptimizer)
    if division is not None:
        policy.forward = all_logits
    batch = ragged_batch(forward.layout.cut, 1000)
    accumulate_gradients(policy, batch, settings.resolved_objective, 0, forward, optimizer, ranks)
    optimizer.step(0)
    return optimizer


def all_logits(*_: Any, **__: Any) -> None:
    """The fused head calls the decoder; the model's own pass computes all logits at once."""
    raise AssertionError("all logits at once")


NAMES = list(trained_parameters(qwen()))


class WatchedTensors(UserDict[str, Tensor]):
    """`alive`: how many of the tensors that were looked up existed at each look."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.looked, self.alive = list[weakref.ref[Tensor]](), list[int]()

    def __getitem__(self, path: str) -> Tensor:
        found = super().__getitem__(path).clone()
        self.looked.append(weakref.ref(found))
        self.alive.append(sum(one() is not None for one in self.looked))
        return found


@pytest.mark.parametrize("fsdp", [False, True])
def test_a_checkpoint_is_read_one_parameter_at_a_time(fsdp: bool) -> None:
    optimizer = stepped(Ranks(1, LEADER, 60.0), fsdp=fsdp)
    saved = WatchedTensors({path: one.clone() for path, one in optimizer.tensors(NAMES).items()})
    optimizer.load_tensors(NAMES, saved)
    kinds = len(saved) // len(NAMES)
    assert len(saved.alive) == len(saved)
    assert max(saved.alive) <= 2 * kinds
