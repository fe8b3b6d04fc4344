"""What each update rule computes, against the libraries, and across a saved state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from grpo_trainer.optimizer import MasterOptimizer
from grpo_trainer.updates.adamw import AdamW32
from grpo_trainer.updates.adamw_8bit import AdamW8bit
from grpo_trainer.updates.masters import Bfloat16Masters, Float32Masters
from grpo_trainer.updates.rounding import Nearest, Stochastic
from tests.unit.trainer.update_variants import DEVICE, SEED, VARIANTS, Model, differing


class TorchAdamW:
    """The same steps by `torch.optim.AdamW` and `clip_grad_norm_`, on fp32 copies."""

    def __init__(self, model: Model, lr: float = 0.01) -> None:
        self.weights = [nn.Parameter(p.detach().float().clone()) for p in model.parameters]
        self._adamw = torch.optim.AdamW(self.weights, lr=lr, weight_decay=0.1, foreach=False)

    def step(self, gradients: list[Tensor | None]) -> float:
        for weights, gradient in zip(self.weights, gradients, strict=True):
            weights.grad = None if gradient is None else gradient.detach().float().clone()
        norm = torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self._adamw.step()
        return float(norm)

    def state(self) -> dict[str, Tensor]:
        """As `MasterOptimizer.tensors` names it."""
        found = {}
        for name, weights in zip(Model.names, self.weights, strict=True):
            kinds = {"master": weights.detach(), **self._adamw.state.get(weights, {})}
            found |= {f"{kind}/{name}": tensor for kind, tensor in kinds.items()}
        return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_adamw_is_torchs_to_the_last_bit(dtype: torch.dtype) -> None:
    model = Model(dtype=dtype)
    reference = TorchAdamW(model)
    for step in range(5):
        model.gather(step, micro_batches=2)
        norm = reference.step(model.optimizer.gradients.tensors)
        assert norm > 1.0  # clipped
        assert model.optimizer.step(step) == norm
        held = model.optimizer.tensors(model.names)
        assert differing(held, reference.state()) == []


def test_torchs_fused_kernel_computes_the_same_within_rounding() -> None:
    plain, fused = Model(), Model(Float32Masters(AdamW32(fused=True)))
    for model in (plain, fused):
        model.steps(0, 5)
    ours, theirs = (model.optimizer.masters[0] for model in (plain, fused))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_adamw_8bit_is_that_of_bitsandbytes_to_the_last_bit() -> None:
    from bitsandbytes.optim import AdamW8bit as Theirs

    model = Model(Float32Masters(AdamW8bit(DEVICE)))
    weights = [nn.Parameter(p.detach().float().clone()) for p in model.parameters]
    theirs = Theirs(weights, lr=0.01, weight_decay=0.1)
    for step in range(5):
        model.gather(step)
        for copy, gradient in zip(weights, model.optimizer.gradients.tensors, strict=True):
            copy.grad = None if gradient is None else gradient.detach().float().clone()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        theirs.step()
        model.optimizer.step(step)
    held = model.optimizer.tensors(model.names)
    for name, copy in zip(model.names, weights, strict=True):
        assert torch.equal(held[f"master/{name}"], copy.detach())
        for kind, value in theirs.state[copy].items():
            found = held[f"{kind}/{name}"]
            assert torch.equal(found, torch.as_tensor(value).to(found)), f"{kind}/{name}"
    assert held["state1/large"].dtype == held["state2/large"].dtype == torch.uint8
    assert held["absmax1/large"].shape == (20,)  # 70 * 71 in blocks of 256, the last one not full
    assert held["state1/small"].dtype == torch.float32


def test_moments_of_a_byte_train_as_well() -> None:
    """Not the same weights, and nearly: 8 bits follow 32 within a part of what 20 steps move."""
    exact, coarse = Model(), Model(Float32Masters(AdamW8bit(DEVICE)))
    before = exact.optimizer.masters[0].clone()
    for model in (exact, coarse):
        model.steps(0, 20)
    moved = (exact.optimizer.masters[0] - before).norm()
    apart = (exact.optimizer.masters[0] - coarse.optimizer.masters[0]).norm()
    assert 0 < apart < 0.05 * moved


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_follows_a_saved_state_is_the_same_to_the_last_bit(
    variant: str, tmp_path: Path
) -> None:
    alone = Model(VARIANTS[variant]())
    expected = alone.steps(0, 6)

    killed = Model(VARIANTS[variant]())
    killed.steps(0, 3)
    save_file(killed.optimizer.tensors(killed.names), tmp_path / "state")

    again = Model(VARIANTS[variant](), seed=1)
    again.optimizer.load_tensors(again.names, load_file(tmp_path / "state"))
    again.optimizer.write_into_parameters()
    assert differing(again.tensors(), killed.tensors()) == []
    assert again.steps(3, 6) == expected[3:]
    assert differing(again.tensors(), alone.tensors()) == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_loaded_state_is_a_copy(variant: str) -> None:
    first = Model(VARIANTS[variant]())
    first.steps(0, 2)
    held = first.tensors()
    second = Model(VARIANTS[variant](), seed=1)
    second.optimizer.load_tensors(second.names, first.optimizer.tensors(first.names))
    second.steps(2, 4)
    assert differing(first.tensors(), held) == []


def test_a_state_goes_from_torchs_fused_kernel_to_the_plain_one_and_back() -> None:
    plain, fused = Model(), Model(Float32Masters(AdamW32(fused=True)), seed=1)
    plain.steps(0, 3)
    fused.optimizer.load_tensors(fused.names, plain.optimizer.tensors(plain.names))
    for model in (plain, fused):
        model.steps(3, 6)
    assert float(fused.optimizer.tensors(fused.names)["step/large"]) == 6
    torch.testing.assert_close(
        plain.optimizer.masters[0], fused.optimizer.masters[0], rtol=1e-6, atol=1e-7
    )


LR = 1e-6
WEIGHTS = 1 << 16


def mean_move(optimizer: MasterOptimizer, parameter: nn.Parameter, steps: int) -> float:
    """Of weights of 1 under a gradient of 1, in learning rates: Adam moves by one each step."""
    for step in range(steps):
        parameter.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step(step)
        optimizer.write_into_parameters()
    moved = float(parameter.detach().double().mean()) - 1.0
    return -moved / LR


def test_bf16_masters_move_with_stochastic_rounding_where_the_nearest_loses_everything() -> None:
    """Just below 1 bf16 resolves 2^-8, 3,900 learning rates of 1e-6."""
    moves = {}
    for name, rounding in {"nearest": Nearest(), "stochastic": Stochastic(SEED, DEVICE)}.items():
        parameter = nn.Parameter(torch.ones(WEIGHTS, dtype=torch.bfloat16, device=DEVICE))
        update = Bfloat16Masters(AdamW32(), rounding)
        optimizer = MasterOptimizer([parameter], LR, 0, 0.0, 1e9, update)
        assert optimizer.masters[0].dtype == torch.bfloat16
        moves[name] = mean_move(optimizer, parameter, steps=50)
        if name == "stochastic":
            # Steps of one resolution, and each weight at most a few of them away.
            assert set(((1 - parameter.detach().float()) * 256).unique().tolist()) <= {0, 1, 2, 3}
    assert moves["nearest"] == 0.0
    # 50 * WEIGHTS * LR * 2^8 = 839 single moves are expected, so a standard deviation is 3.5 % of
    # them; four.
    assert moves["stochastic"] == pytest.approx(50, rel=0.14)


def test_moments_of_bf16_masters_are_in_fp32() -> None:
    model = Model(VARIANTS["adamw, bf16 stochastic"]())
    model.steps(0, 1)
    held = model.optimizer.tensors(model.names)
    assert held["master/large"].dtype == torch.bfloat16
    assert held["exp_avg/large"].dtype == held["exp_avg_sq/large"].dtype == torch.float32
