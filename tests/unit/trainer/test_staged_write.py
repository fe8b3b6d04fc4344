"""What a step leaves ready for the write is what the write would have made, and goes with it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from grpo_trainer.updates.adamw import AdamW32
from grpo_trainer.updates.base import Pace, State
from grpo_trainer.updates.masters import Float32Masters
from tests.unit.trainer.update_variants import VARIANTS, Model, differing


def alive(shapes: set[tuple[int, ...]], dtype: torch.dtype) -> int:
    """Tensors of these shapes and this type that anybody holds."""
    gc.collect()
    return sum(
        type(found) is Tensor and found.dtype == dtype and tuple(found.shape) in shapes
        for found in gc.get_objects()
    )


class Watched(Float32Masters):
    """Knows whether the gradients that it was given are gone."""

    def __init__(self) -> None:
        super().__init__(AdamW32())
        self.given: list[weakref.ref[Tensor]] = []

    def take(
        self, master: Tensor, gradient: Tensor, state: State, pace: Pace, served: torch.dtype
    ) -> None:
        assert all(before() is None for before in self.given)
        self.given.append(weakref.ref(gradient))
        super().take(master, gradient, state, pace, served)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_staged_write_is_the_direct_one_bit_for_bit(dtype: torch.dtype) -> None:
    model = Model(dtype=dtype)
    for step in range(3):
        model.step(step)
        expected = [master.to(dtype) for master in model.optimizer.masters]
        before = [p.detach().clone() for p in model.parameters]
        assert not torch.equal(before[0], expected[0])
        model.optimizer.write_into_parameters()
        for parameter, value in zip(model.parameters, expected, strict=True):
            assert torch.equal(parameter, value)
        assert model.optimizer.unwritten_parameters() == 0


def test_what_is_written_is_what_the_step_staged() -> None:
    """Not a second rounding: otherwise the pause would read the fp32 masters after all."""
    model = Model()
    model.step(0)
    with torch.no_grad():
        model.optimizer.masters[0].add_(1.0)
    model.optimizer.write_into_parameters()
    assert model.optimizer.unwritten_parameters() == 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_repeated_write_gives_the_same_bytes(variant: str) -> None:
    """A server that restarts has lost what was written; a stochastic rounding is not repeated."""
    model = Model(VARIANTS[variant]())
    model.steps(0, 3)
    written = [p.detach().clone() for p in model.parameters]
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters:
                parameter.zero_()
        model.optimizer.write_into_parameters()
        for parameter, value in zip(model.parameters, written, strict=True):
            assert torch.equal(parameter, value)


def test_the_write_lets_go_of_what_was_staged() -> None:
    model = Model()
    shapes = {(70, 71), (5, 3)}
    before = alive(shapes, torch.bfloat16)
    model.step(0)
    assert alive(shapes, torch.bfloat16) == before + 2
    model.optimizer.write_into_parameters()
    assert alive(shapes, torch.bfloat16) == before


def test_a_gradient_is_gone_before_its_staging_copy_is_made_and_the_next_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    update = Watched()
    model = Model(update)
    copies, to = [], Tensor.to

    def spy(tensor: Tensor, *to_what: torch.dtype) -> Tensor:
        copies.append([gradient() is None for gradient in update.given])
        return to(tensor, *to_what)

    model.gather(0)
    monkeypatch.setattr(Tensor, "to", spy)
    model.optimizer.step(0)
    assert copies == [[True], [True, True]]
    assert model.optimizer.gradients.tensors == [None] * 3


@pytest.mark.parametrize(
    ("variant", "dtype"), [("adamw", torch.float32), ("adamw, bf16 stochastic", torch.bfloat16)]
)
def test_nothing_is_staged_where_the_types_are_equal(variant: str, dtype: torch.dtype) -> None:
    model = Model(VARIANTS[variant](), dtype)
    shapes = {(70, 71), (5, 3)}
    model.steps(0, 1)  # its moments are made
    before = alive(shapes, dtype)
    model.step(1)
    assert alive(shapes, dtype) == before


def test_a_loaded_state_takes_the_place_of_what_was_staged() -> None:
    saved, model = Model(), Model(seed=1)
    saved.steps(0, 2)
    model.step(0)
    model.optimizer.load_tensors(model.names, saved.optimizer.tensors(saved.names))
    model.optimizer.write_into_parameters()
    assert differing(model.tensors(), saved.tensors()) == []


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


def test_the_norm_of_bf16_gradients_is_taken_in_fp32() -> None:
    model = Model()
    model.gather(0)
    gathered = [g for g in model.optimizer.gradients.tensors if g is not None]
    exact = torch.cat([g.double().flatten() for g in gathered]).norm()
    assert gathered[0].dtype == torch.bfloat16
    assert float(model.optimizer.gradients.norm()) == pytest.approx(float(exact), rel=1e-6)
