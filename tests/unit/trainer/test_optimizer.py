"""One step on the masters and its staged write into the served parameters."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from grpo_trainer.errors import NonFiniteGradient
from grpo_trainer.optimizer import MasterOptimizer
from tests.unit.trainer.update_variants import VARIANTS, Model, differing


def optimizer(parameter: nn.Parameter, lr: float, warmup_steps: int = 0) -> MasterOptimizer:
    return MasterOptimizer([parameter], lr, warmup_steps, weight_decay=0.0, max_grad_norm=1.0)


def take_step(parameter: nn.Parameter, masters: MasterOptimizer, step: int = 0) -> None:
    parameter.float().sum().backward()  # type: ignore[no-untyped-call]
    masters.step(step)
    masters.write_into_parameters()


def test_small_updates_add_up_that_bf16_alone_would_lose() -> None:
    """At lr 1e-4 one step moves a weight of 1 by 1e-4; bf16 resolves 4e-3 there."""
    parameter = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    masters = optimizer(parameter, lr=1e-4)
    take_step(parameter, masters)
    assert parameter.tolist() == [1.0] * 8  # not yet visible: nothing was lost, only rounded
    for step in range(1, 60):
        take_step(parameter, masters, step)
    assert masters.masters[0].tolist() == pytest.approx([1 - 60e-4] * 8, rel=1e-4)
    assert parameter.tolist() == pytest.approx([1 - 60e-4] * 8, abs=4e-3)
    assert parameter.tolist() != [1.0] * 8


def test_warm_up_by_hand() -> None:
    masters = optimizer(nn.Parameter(torch.zeros(1)), lr=0.4, warmup_steps=4)
    rates = [masters.learning_rate(step) for step in range(6)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_a_non_finite_gradient_stops_before_any_weight_moves() -> None:
    parameter = nn.Parameter(torch.ones(2))
    masters = optimizer(parameter, lr=0.1)
    (parameter * torch.tensor([1.0, float("nan")])).sum().backward()
    with pytest.raises(NonFiniteGradient, match="step 7"):
        masters.step(7)
    assert masters.masters[0].tolist() == [1.0, 1.0]
    assert parameter.tolist() == [1.0, 1.0]


def test_the_first_gradient_is_kept_as_it_came_and_the_sum_is_that_in_fp32() -> None:
    """In bf16 the second addend would vanish: 256 + 1 is 256 there."""
    model = Model()
    parameter = model.parameters[0]
    (parameter * 256.0).sum().backward()  # type: ignore[no-untyped-call]
    (first,) = (g for g in model.optimizer.gradients.tensors if g is not None)
    assert first.dtype == torch.bfloat16
    (parameter * 1.0).sum().backward()  # type: ignore[no-untyped-call]
    (both,) = (g for g in model.optimizer.gradients.tensors if g is not None)
    assert both.dtype == torch.float32
    assert both.unique().tolist() == [257.0]
    assert parameter.grad is None


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [*((variant, torch.bfloat16) for variant in VARIANTS), ("adamw", torch.float16)],
)
def test_a_write_puts_the_rounded_masters_into_the_same_memory_each_time(
    variant: str, dtype: torch.dtype
) -> None:
    """Again if it is repeated: a server that restarts has lost the first one."""
    model = Model(VARIANTS[variant](), dtype=dtype)
    addresses = [p.data_ptr() for p in model.parameters]
    for step in range(3):
        model.step(step)
        expected = [master.to(dtype) for master in model.optimizer.masters]
        assert not torch.equal(model.parameters[0], expected[0])
        model.optimizer.write_into_parameters()
        assert differing(named(model.parameters), named(expected)) == []
    with torch.no_grad():
        for parameter in model.parameters:
            parameter.zero_()
    assert model.optimizer.unwritten_parameters() == 3
    model.optimizer.write_into_parameters()
    assert differing(named(model.parameters), named(expected)) == []
    assert model.optimizer.unwritten_parameters() == 0
    assert [p.data_ptr() for p in model.parameters] == addresses


def named(tensors: list[Tensor] | list[nn.Parameter]) -> dict[str, Tensor]:
    return {name: t.detach() for name, t in zip(Model.names, tensors, strict=True)}


def test_a_write_copies_the_staged_result_and_does_not_round_again() -> None:
    """Otherwise the pause would read the fp32 masters after all."""
    model = Model()
    model.step(0)
    with torch.no_grad():
        model.optimizer.masters[0].add_(1.0)
    model.optimizer.write_into_parameters()
    assert model.optimizer.unwritten_parameters() == 1


def test_a_loaded_state_replaces_the_staged_result() -> None:
    saved, model = Model(), Model(seed=1)
    saved.steps(0, 2)
    model.step(0)
    model.optimizer.load_tensors(model.names, saved.optimizer.tensors(saved.names))
    model.optimizer.write_into_parameters()
    assert differing(model.tensors(), saved.tensors()) == []


@pytest.mark.parametrize(
    ("variant", "dtype", "staged"),
    [
        ("adamw", torch.bfloat16, 2),
        ("adamw", torch.float32, 0),
        ("adamw, bf16 stochastic", torch.bfloat16, 0),
    ],
)
def test_a_step_stages_only_masters_of_another_type_and_the_write_frees_them(
    variant: str, dtype: torch.dtype, staged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(VARIANTS[variant](), dtype)
    made: list[weakref.ref[Tensor]] = []
    original = Tensor.to

    def watched(tensor: Tensor, *args: torch.dtype) -> Tensor:
        result = original(tensor, *args)
        if result is not tensor:
            made.append(weakref.ref(result))
        return result

    model.gather(0)
    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "to", watched)
        model.optimizer.step(0)
    assert [one() is not None for one in made] == [True] * staged
    model.optimizer.write_into_parameters()
    assert [one() is not None for one in made] == [False] * staged
