"""Trains a tiny model alone, or with a second real process, on the same batches."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from grpo_core.tree.optim import ProcessOptions
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.tree.trainer_command import CommandLine
from grpo_core.wire.policy_version import PolicyVersion
from grpo_runs.offline.local import LocalGeneration
from grpo_trainer.data.collate import Batch, broadcast_batch
from grpo_trainer.errors import LostRank, NonFiniteLoss
from grpo_trainer.learner import GradientStats, build_learner
from grpo_trainer.model import forward
from grpo_trainer.model.adapter import trained_parameters
from grpo_trainer.model.division import whole_tensors
from grpo_trainer.model.loading import TrainedWeights, broadcast_policy
from grpo_trainer.model.policy import compile_layers
from grpo_trainer.optim.buckets import own_part
from grpo_trainer.ranks import ALONE, Ranks, join
from tests.support.forked import forked
from tests.unit.trainer.forward_rig import ragged_batch

RANKS = 2
DEADLINE_S = 600.0
LOST = "lost.txt"


def met(rank: int, meeting: str) -> Ranks:
    """This process as one of two. Args: meeting: a URL of a file"""
    options = {"world_size": RANKS, "trainer_rank": rank, "init_method": meeting}
    return join(ProcessOptions(**options, rank_deadline_s=2 * DEADLINE_S))


@dataclass(frozen=True)
class Case:
    """Args:
    tokens: of a micro-batch
    steps: optimizer steps after the first gradients
    """

    name: str
    tokens: int
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 0

    def settings(self, model: str) -> TrainerSettings:
        always = {"model": model, "mode": "none", "world_size": RANKS, "lr": 1e-3}
        given = always | {"rank_deadline_s": 1e4} | self.options
        return CommandLine.model_validate(given).settings()


def learn(case: Case, model: str, ranks: Ranks = ALONE) -> dict[str, Any]:
    """The gradients, sums and tokens of a batch, and the weights after some steps. Every rank runs
    it; rank 0 alone has the model's and the batch's values."""
    settings = case.settings(model)
    policy: Any = None
    if ranks.leads:
        dtype = getattr(torch, settings.master_dtype)
        policy = TrainedWeights.of(settings).load(dtype).eval()
        torch.manual_seed(1)
        for parameter in policy.parameters():  # so that the others need rank 0's weights
            parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    policy, settings = broadcast_policy(policy, settings, ranks)
    with pytest.MonkeyPatch.context() as patch:  # inductor takes a minute
        patch.setattr(forward, "compile_layers", partial(compile_layers, backend="aot_eager"))
        learner = build_learner(policy, settings, ranks)
    orders = learner.orders
    optimizer, accumulate = learner.optimizer, learner.accumulate_once
    objective = settings.resolved_objective
    whole = ragged_batch(learner.forward.layout.cut, case.tokens)
    whole = broadcast_batch(whole if ranks.leads else None, ranks)
    batch = learner.with_reference(whole)
    overflowed = _overflows(lambda b: accumulate(b, objective, 0), batch)
    optimizer.gradients.clear()
    found = accumulate(batch, objective, 0)
    gradients = [None if g is None else g.clone() for g in optimizer.gradients.tensors]
    norm, names = optimizer.step(0), list(trained_parameters(policy))
    for step in range(1, case.steps):
        optimizer.write_into_parameters()
        optimizer.load_tensors(names, as_read(optimizer.tensors(names)))
        accumulate(batch, objective, step)
        optimizer.step(step)
    optimizer.write_into_parameters()
    state = whole_state(optimizer.tensors(names))
    rounding = optimizer.update.rounding
    noise = ranks.gathered(str(rounding and rounding.next_seed()))
    if not ranks.leads:
        learner.follow()
        return {}
    orders.begin()
    trained = dict(whole_tensors(policy, trained_parameters(policy)))
    tokenizer = AutoTokenizer.from_pretrained(model)
    source = LocalGeneration(policy, tokenizer, lambda: PolicyVersion(1, 0))
    sampled = asyncio.run(source.generate([1, 2, 3], max_tokens=4, temperature=0))
    orders.end()
    return {
        "micro_batches": len(batch.micro_batches),
        "loss_parts": torch.tensor(found.loss_parts),
        "sums": vars(found.sums),
        "tokens": vars(found.tokens),
        "gradients": gradients,
        "norm": norm,
        "weights": trained,
        "sampled": sampled.token_ids,
        "noise": noise,
        "state": state,
        "state_bytes": optimizer.state_bytes(),
        "overflowed": overflowed,
        "held": sum(own_part(parameter).numel() for parameter in policy.parameters()),
    }


def as_read(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies, as they would come from a checkpoint: scales are whole."""
    return {
        path: tensor.full_tensor()
        if isinstance(tensor, DTensor) and "absmax" in path
        else tensor.clone()
        for path, tensor in tensors.items()
    }


def whole_state(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies. Every rank calls it."""
    return {
        path: one.full_tensor() if isinstance(one, DTensor) else one.clone()
        for path, one in tensors.items()
    }


def _overflows(accumulate: Any, batch: Batch) -> bool:
    """Whether a batch is refused whose last micro-batch has an infinite advantage."""
    *others, last = batch.micro_batches
    harmed = replace(last, advantages=torch.full_like(last.advantages, math.inf))
    try:
        stats: GradientStats = accumulate(replace(batch, micro_batches=[*others, harmed]))
    except NonFiniteLoss:
        return True
    return not math.isfinite(stats.loss)


def together(cases: list[Case], model: str, directory: Path) -> None:
    """Run the cases on two processes, and write each result below `directory`. Then rank 0 ends
    without a word."""
    workers = [
        forked().Process(target=_work, args=(rank, cases, model, directory))
        for rank in range(RANKS)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(2 * DEADLINE_S)
        worker.kill()


def _work(rank: int, cases: list[Case], model: str, directory: Path) -> None:
    torch.set_num_threads(1)
    meeting = (directory / "meeting").as_uri()
    ranks = met(rank, meeting)
    for case in cases:
        found = learn(case, model, ranks)
        if ranks.leads:
            torch.save(found, directory / case.name)
    if ranks.leads:
        os._exit(3)
    try:
        ranks.broadcast(None, "the next batch")
    except LostRank as error:
        (directory / LOST).write_text(str(error))
    os._exit(0)
