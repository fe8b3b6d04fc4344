from __future__ import annotations

import pytest
import torch
from torch import nn

from grpo_trainer.errors import NonFiniteGradient
from grpo_trainer.optimizer import MasterOptimizer


def optimizer(parameter: nn.Parameter, lr: float, warmup_steps: int = 0) -> MasterOptimizer:
    return MasterOptimizer([parameter], lr, warmup_steps, weight_decay=0.0, max_grad_norm=1.0)


def take_step(parameter: nn.Parameter, masters: MasterOptimizer, step: int = 0) -> float:
    parameter.float().sum().backward()
    norm = masters.step(step)
    masters.write_into_parameters()
    return norm


def test_small_updates_add_up_that_bf16_alone_would_lose() -> None:
    """At lr 1e-4 one step moves a weight of 1 by 1e-4; bf16 resolves 4e-3 there."""
    parameter = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    address = parameter.data_ptr()
    masters = optimizer(parameter, lr=1e-4)
    take_step(parameter, masters)
    assert parameter.tolist() == [1.0] * 8  # not yet visible: nothing was lost, only rounded
    for step in range(1, 60):
        take_step(parameter, masters, step)
    assert masters.masters[0].tolist() == pytest.approx([1 - 60e-4] * 8, rel=1e-4)
    assert parameter.tolist() == pytest.approx([1 - 60e-4] * 8, abs=4e-3)
    assert parameter.tolist() != [1.0] * 8
    assert parameter.data_ptr() == address

    plain = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    adamw = torch.optim.AdamW([plain], lr=1e-4, weight_decay=0.0)
    for _ in range(60):
        plain.float().sum().backward()
        adamw.step()
        adamw.zero_grad()
    assert plain.tolist() == [1.0] * 8


def test_gradients_of_several_backwards_add_up_in_fp32_and_are_clipped_once() -> None:
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    masters = optimizer(parameter, lr=0.1)
    for _ in range(3):
        (parameter.float() * 1.0).sum().backward()
    assert parameter.grad is None
    (gathered,) = masters.gradients.tensors
    assert gathered is not None
    assert gathered.dtype == torch.float32
    assert gathered.tolist() == [3.0] * 4
    assert masters.step(0) == pytest.approx(6.0)  # sqrt(4 * 3^2), before clipping


def test_warm_up_by_hand() -> None:
    masters = optimizer(nn.Parameter(torch.zeros(1)), lr=0.4, warmup_steps=4)
    rates = [masters.learning_rate(step) for step in range(6)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_gradient_stops_before_any_weight_moves(bad: float) -> None:
    parameter = nn.Parameter(torch.ones(2))
    masters = optimizer(parameter, lr=0.1)
    (parameter * torch.tensor([1.0, bad])).sum().backward()
    with pytest.raises(NonFiniteGradient, match="step 7"):
        masters.step(7)
    assert masters.masters[0].tolist() == [1.0, 1.0]
    assert parameter.tolist() == [1.0, 1.0]
