"""The gradients of several ranks are added up while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from grpo_trainer.optim import buckets
from grpo_trainer.optim.buckets import buckets_of
from grpo_trainer.optim.gradients import Gradients
from grpo_trainer.optim.master_update import MasterUpdate
from grpo_trainer.optim.rules import AdamW32
from grpo_trainer.ranks import Ranks


@dataclass(frozen=True)
class TwiceRanks(Ranks):
    """Two ranks with equal gradients. A sum is there when it is waited for."""

    begun: list[int] = field(default_factory=list)

    def begin_total(self, tensor: Tensor) -> Callable[[], object]:
        self.begun.append(len(tensor))
        return lambda: tensor.mul_(2)

    def total(self, tensor: Tensor) -> Tensor:
        return tensor.mul_(2)


def test_sums_begin_in_the_backward_pass_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three layers the second has no gradient, so the first waits for the end of the pass."""
    monkeypatch.setattr(buckets, "PART_ELEMENTS", 1)  # a bucket for each parameter
    ranks, inputs = TwiceRanks(2), torch.ones(1, 8)
    first, unused, last = (nn.Linear(8, n, bias=False) for n in (8, 256, 128))
    parameters = [layer.weight for layer in (first, unused, last)]
    gradients = Gradients(buckets_of(parameters, 0.0, MasterUpdate(AdamW32())))
    for is_last in (False, True):
        if is_last:
            gradients.begin_adding_up(ranks)
        last(first(inputs)).sum().backward()
        gradients.gather()
        assert ranks.begun == [1024] * is_last
    gradients.add_up(ranks)
    assert ranks.begun == [1024, 2048, 1024]  # of `first`, padded
    of_first, of_unused, of_last = gradients.tensors
    assert of_unused is None
    assert of_first is not None
    assert of_last is not None
    torch.testing.assert_close(of_last, 4 * first(inputs).detach().expand(128, 8))
    torch.testing.assert_close(of_first, 4 * last.weight.detach().sum(0)[:, None].expand(8, 8))
