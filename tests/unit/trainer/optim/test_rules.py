"""Each update rule computes its library's steps, also after a restore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.optim.master_update import MasterUpdate, StochasticRounding
from grpo_trainer.optim.rules import Adafactor, Adam, AdamW8bit, AdamW32
from tests.unit.trainer.update_variants import (
    CPU,
    RATE,
    VARIANTS,
    Model,
    decay_per_step,
    differing,
    stochastic,
)

OTHER = Adam(0.8, 0.95, 1e-3)
OTHERS_NAMES: dict[str, Any] = {"betas": (OTHER.beta1, OTHER.beta2), "eps": OTHER.eps}


class Reference:
    """fp32 copies of a model's parameters, which a library updates with the model's gradients."""

    def __init__(self, model: Model, library: Any, weight_decay: float, **options: Any) -> None:
        self.weights = [nn.Parameter(p.detach().float().clone()) for p in model.parameters]
        self._library = library(self.weights, lr=0.01, weight_decay=weight_decay, **options)

    def step(self, optimizer: MasterOptimizer) -> float:
        """Returns the library's norm. Clips with the optimizer's, whose last bit may differ."""
        for weights, gradient in zip(self.weights, optimizer.gradients.tensors, strict=True):
            weights.grad = None if gradient is None else gradient.detach().float().clone()
        norm = torch.nn.utils.get_total_norm(w.grad for w in self.weights if w.grad is not None)
        ours = torch.tensor(optimizer.gradient_norm(0))
        torch.nn.utils.clip_grads_with_norm_(self.weights, 1.0, ours)
        self._library.step()
        return float(norm)

    def state(self) -> dict[str, Tensor]:
        """Tensors named as in `MasterOptimizer.tensors`."""
        found = {}
        for name, weights in zip(Model.names, self.weights, strict=True):
            kinds = {"master": weights.detach(), **self._library.state.get(weights, {})}
            found |= {f"{kind}/{name}": value for kind, value in kinds.items()}
        return {path: torch.as_tensor(value) for path, value in found.items()}


@pytest.mark.parametrize("part", [1024, 2**22])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_adamw_is_torchs_to_the_last_bit(
    dtype: torch.dtype, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_trainer.optim.buckets.PART_ELEMENTS", part)
    model = Model(dtype=dtype, weight_decay=0.0, adam=OTHER)
    reference = Reference(model, torch.optim.AdamW, 0.0, fused=True, **OTHERS_NAMES)
    for step in range(5):
        model.gather(step, micro_batches=1 + step % 2)
        norm = reference.step(model.optimizer)
        assert norm > 1.0  # clipped
        assert model.optimizer.step(step) == pytest.approx(norm, rel=1e-6)
        assert differing(model.optimizer.tensors(model.names), reference.state()) == []


def test_adamw_8bit_is_that_of_bitsandbytes_to_the_last_bit() -> None:
    from bitsandbytes.optim import AdamW8bit as Theirs

    model = Model(MasterUpdate(AdamW8bit(CPU)), weight_decay=0.0, adam=OTHER)
    reference = Reference(model, Theirs, 0.0, **OTHERS_NAMES)
    for step in range(5):
        model.gather(step)
        reference.step(model.optimizer)
        model.optimizer.step(step)
    held = model.optimizer.tensors(model.names)
    expected = {path: value.to(held[path]) for path, value in reference.state().items()}
    assert differing(held, expected) == []
    assert held["state1/large"].dtype == held["state2/large"].dtype == torch.uint8


def test_adafactor_is_that_of_transformers_with_the_learning_rate_as_its_step_size() -> None:
    """Both follow the paper. They add its constant of 1e-30 in different places."""
    from transformers import Adafactor as Theirs

    model = Model(MasterUpdate(Adafactor()), dtype=torch.float32, weight_decay=0.0)
    options = {"scale_parameter": False, "relative_step": False, "warmup_init": False}
    reference = Reference(model, Theirs, 0.0, **options)
    for step in range(5):
        model.gather(step, micro_batches=1 + step % 2)
        reference.step(model.optimizer)
        model.optimizer.step(step)
    for ours, theirs in zip(model.optimizer.masters, reference.weights, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)
    held = model.optimizer.tensors(model.names)
    assert held["row_var/large"].shape == (70, 1)
    assert held["col_var/large"].shape == (1, 72)


@pytest.mark.parametrize("variant", ["adamw", "adamw_8bit", "adafactor"])
def test_weight_decay_counts_where_one_step_of_it_is_less_than_float32_resolves(
    variant: str,
) -> None:
    """The libraries multiply by 1 - lr * weight decay, which rounds to 1 here."""
    assert decay_per_step(VARIANTS[variant], 1 << 18) == pytest.approx(RATE, rel=0.02)


@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_after_a_saved_state_are_the_same_to_the_last_bit(
    variant: str, tmp_path: Path
) -> None:
    alone, killed = Model(VARIANTS[variant]()), Model(VARIANTS[variant]())
    expected = alone.steps(0, 6)
    killed.steps(0, 3)
    save_file(killed.optimizer.tensors(killed.names), tmp_path / "state")

    again = Model(VARIANTS[variant](), seed=1)
    again.step(0)  # the staged result is replaced too
    saved = load_file(tmp_path / "state")
    again.optimizer.load_tensors(again.names, saved)
    again.optimizer.write_into_parameters()
    assert differing(again.tensors(), killed.tensors()) == []
    held = sum(tensor.nbytes for tensor in killed.optimizer.tensors(killed.names).values())
    # The parameter without a gradient has no state yet.
    moments_of_unused = 4 * (1 if "adafactor" in variant else 2) * 4 + 4
    assert again.optimizer.state_bytes() == held + moments_of_unused
    assert again.steps(3, 6) == expected[3:]
    assert differing(again.tensors(), alone.tensors()) == []
    assert differing(saved, killed.optimizer.tensors(killed.names)) == []  # the restore made a copy


LR = 1e-6
WEIGHTS = 1 << 16


@pytest.mark.parametrize(
    ("rounding", "moves", "error"),
    [
        (None, 0.0, 0.0),
        # 50 * WEIGHTS * LR * 2^8 = 839 single moves are expected. Their standard deviation is
        # 3.5 %, and the bound is four of those.
        (stochastic(), 50.0, 0.14),
    ],
)
def test_bf16_masters_move_with_stochastic_rounding_and_lose_everything_with_the_nearest(
    rounding: StochasticRounding | None, moves: float, error: float
) -> None:
    """Just below 1, bf16 resolves 2^-8: 3,900 times the learning rate of 1e-6. Adam moves a weight
    by one learning rate in each of 50 steps."""
    parameter = nn.Parameter(torch.ones(WEIGHTS, dtype=torch.bfloat16))
    update = MasterUpdate(AdamW32(), torch.bfloat16, rounding)
    optimizer = MasterOptimizer([parameter], lambda _: LR, 0.0, 1e9, update)
    for step in range(50):
        parameter.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step(step)
        optimizer.write_into_parameters()
    lost = 1 - parameter.detach().double()
    assert set((lost * 256).unique().tolist()) <= {0, 1, 2, 3}  # in units of bf16's resolution
    assert float(lost.mean()) / LR == pytest.approx(moves, rel=error)
