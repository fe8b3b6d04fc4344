"""The fused step, in Triton's interpreter: run by `test_fused_step.py`, in a process that has
TRITON_INTERPRET=1 from its beginning. For a GPU see `update_variants.py`."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn

from grpo_trainer.optimizer import MasterOptimizer
from grpo_trainer.updates.base import Pace
from grpo_trainer.updates.fused_adamw import FusedAdamW
from grpo_trainer.updates.fused_kernel import _nearest_bfloat16
from tests.unit.trainer.update_variants import DEVICE, Model, differing

assert DEVICE.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"

ULPS = 4


def ulps_apart(ours: Tensor, theirs: Tensor) -> int:
    """The largest distance, in steps from one fp32 number to the next."""

    def ordered(tensor: Tensor) -> Tensor:
        bits = tensor.view(torch.int32).long()
        return torch.where(bits < 0, -(1 << 31) - bits, bits)

    return int((ordered(ours) - ordered(theirs)).abs().max())


@pytest.mark.parametrize("shape", [(1,), (7,), (1023,), (1024,), (1025,), (33, 129)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_it_is_torchs_adamw_within_a_few_ulp(
    shape: tuple[int, ...], weight_decay: float, scale: float
) -> None:
    torch.manual_seed(0)
    weights = nn.Parameter(torch.randn(shape, device=DEVICE))
    adamw = torch.optim.AdamW([weights], lr=0.01, weight_decay=weight_decay)
    fused, master = FusedAdamW(), weights.detach().clone()
    state = fused.initial_state(master)
    for _ in range(5):
        gradient = torch.randn(shape, device=DEVICE)
        weights.grad = gradient * scale
        adamw.step()
        pace = Pace(0.01, weight_decay, scale)
        assert fused.take(master, gradient, state, pace, torch.float32) is None
        theirs = adamw.state[weights]
        assert state.keys() == theirs.keys()
        assert torch.equal(state["step"], theirs["step"])
        assert ulps_apart(state["exp_avg_sq"], theirs["exp_avg_sq"]) <= ULPS
        # Where addends of the first moment cancel, what is left is of the size of their rounding.
        torch.testing.assert_close(state["exp_avg"], theirs["exp_avg"], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(master, weights.detach(), rtol=ULPS * 2**-23, atol=1e-8)


@pytest.mark.parametrize("gathered", [torch.float32, torch.bfloat16])
def test_it_writes_exactly_the_rounded_master(gathered: torch.dtype) -> None:
    torch.manual_seed(0)
    master = torch.randn(3001, device=DEVICE)
    fused, state = FusedAdamW(), FusedAdamW().initial_state(master)
    for _ in range(3):
        gradient = torch.randn(3001).to(DEVICE, gathered)
        low = fused.take(master, gradient, state, Pace(0.01, 0.1, 0.5), torch.bfloat16)
        assert low is not None
        assert torch.equal(low, master.to(torch.bfloat16))


def test_nothing_beyond_the_end_is_touched() -> None:
    fused, rows = FusedAdamW(), torch.ones(3, 1000, device=DEVICE)
    state = fused.initial_state(rows[1])
    fused.take(rows[1], torch.ones_like(rows[1]), state, Pace(0.01, 0.0), torch.float32)
    assert rows[0].tolist() == rows[2].tolist() == [1.0] * 1000
    assert rows[1].unique().tolist() == pytest.approx([0.99])


def test_the_nearest_bf16_has_its_hard_cases_right() -> None:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(x, y, N: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, N)
        tl.store(y + at, _nearest_bfloat16(tl.load(x + at)))

    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF]  # ties to even; above and below a tie
    bits += [0x7F7FFFFF, 0x7F800000, -0x800000, 0x7F800001]  # up to infinity; infinities; NaN
    bits += [0x00008000, 0x00018000, -0x80000000, -0x7FFFFFFF]  # too small for normal numbers; -0
    bits += [0x7FFFFFFF, -1, 0x3F80FFFF, 0]  # NaN that a carry would end; a carry into the exponent
    x = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32).to(DEVICE)
    y = torch.empty_like(x)
    kernel[(1,)](x, y, N=len(bits))
    expected = x.to(torch.bfloat16).float()
    is_nan = x.isnan()
    assert is_nan.sum() == 3
    assert torch.equal(y.isnan(), is_nan)
    assert torch.equal(y[~is_nan].view(torch.int32), expected[~is_nan].view(torch.int32))


def test_a_whole_optimizer_steps_clips_stages_and_writes() -> None:
    plain, fused = Model(), Model(FusedAdamW())
    for step in range(4):
        norms = [model.step(step, micro_batches=1 + step % 2) for model in (plain, fused)]
        assert norms[0] > 1.0
        assert norms[1] == pytest.approx(norms[0], rel=1e-5)
        for model in (plain, fused):
            model.optimizer.write_into_parameters()
        assert fused.optimizer.unwritten_parameters() == 0
    ours, theirs = (model.optimizer.masters[0] for model in (fused, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_what_is_written_is_what_the_kernel_rounded() -> None:
    model = Model(FusedAdamW())
    model.step(0)
    with torch.no_grad():
        model.optimizer.masters[0].add_(1.0)
    model.optimizer.write_into_parameters()
    assert model.optimizer.unwritten_parameters() == 1


def taken_over(source: Model, target: Model) -> MasterOptimizer:
    target.optimizer.load_tensors(target.names, source.optimizer.tensors(source.names))
    target.optimizer.write_into_parameters()
    return target.optimizer


def test_what_follows_a_saved_state_is_the_same_to_the_last_bit() -> None:
    alone, killed, again = (Model(FusedAdamW(), seed=seed) for seed in (0, 0, 1))
    expected = alone.steps(0, 6)
    killed.steps(0, 3)
    taken_over(killed, again)
    assert again.steps(3, 6) == expected[3:]
    assert differing(again.tensors(), alone.tensors()) == []


@pytest.mark.parametrize("fused_first", [True, False])
def test_a_run_goes_on_with_the_other_step(fused_first: bool) -> None:
    alone = Model()
    alone.steps(0, 6)
    updates = [FusedAdamW(), None] if fused_first else [None, FusedAdamW()]
    first, second = Model(updates[0]), Model(updates[1], seed=1)
    first.steps(0, 3)
    taken_over(first, second)
    second.steps(3, 6)
    held, expected = second.optimizer.tensors(second.names), alone.optimizer.tensors(alone.names)
    assert held.keys() == expected.keys()
    for path, tensor in held.items():
        torch.testing.assert_close(tensor, expected[path], rtol=1e-5, atol=1e-7)
