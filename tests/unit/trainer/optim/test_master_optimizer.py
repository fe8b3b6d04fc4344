"""Master weights: one step, its staged write, and options that stop the run at its start."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor, nn

from grpo_core.settings import load_settings
from grpo_core.tree.objectives import GRPO
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.tree.trainer_command import CommandLine
from grpo_trainer.errors import NonFiniteGradient, UnusableOptimizer
from grpo_trainer.learner import accumulate_gradients
from grpo_trainer.model.adapter import with_adapter
from grpo_trainer.optim.loss_scale import GROWTH_STEPS, LossScale, ScaleRecord
from grpo_trainer.optim.master_optimizer import MasterOptimizer, build_optimizer
from grpo_trainer.optim.master_update import build_update
from tests.unit.trainer.forward_rig import qwen, ragged_batch
from tests.unit.trainer.tiny_policy import LORA
from tests.unit.trainer.update_variants import VARIANTS, Model, differing


def optimizer(parameter: nn.Parameter, lr: float) -> MasterOptimizer:
    return MasterOptimizer([parameter], lambda _: lr, weight_decay=0.0, max_grad_norm=1.0)


def take_step(parameter: nn.Parameter, masters: MasterOptimizer, step: int = 0) -> None:
    parameter.float().sum().backward()  # type: ignore[no-untyped-call]
    masters.step(step)
    masters.write_into_parameters()


def test_small_updates_add_up_that_bf16_alone_would_lose() -> None:
    """At lr 1e-4 one step moves a weight of 1 by 1e-4; bf16 resolves 4e-3 at 1."""
    parameter = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    masters = optimizer(parameter, lr=1e-4)
    take_step(parameter, masters)
    assert parameter.tolist() == [1.0] * 8  # not yet visible: the update is kept, only rounded away
    for step in range(1, 60):
        take_step(parameter, masters, step)
    assert masters.masters[0].tolist() == pytest.approx([1 - 60e-4] * 8, rel=1e-4)
    assert parameter.tolist() == pytest.approx([1 - 60e-4] * 8, abs=4e-3)
    assert parameter.tolist() != [1.0] * 8


@pytest.mark.parametrize(
    ("dtype", "rounding", "lr", "lost"),
    [
        ("float32", "nearest", 1e-4, 0.0),
        ("bfloat16", "nearest", 1e-4, 1.0),
        ("bfloat16", "nearest", 1e-1, 0.0),
        ("bfloat16", "stochastic", 1e-4, 0.0),  # not judged: the mean is right
        ("bfloat16", "nearest", 0.0, 0.0),
        ("float32", "nearest", 1e-8, 0.0),  # not judged: too small for any type
    ],
)
def test_the_share_of_lost_updates(dtype: str, rounding: str, lr: float, lost: float) -> None:
    """Of weights with a gradient: the other half has none."""
    parameter = nn.Parameter(torch.ones(4, 2, dtype=torch.bfloat16))
    changes = {"master_dtype": dtype, "rounding": rounding, "optimizer": "adamw"}
    options = CommandLine.model_validate({"model": "m", "mode": "none"} | changes).settings()
    update = build_update(options, [parameter])
    masters = MasterOptimizer([parameter], lambda _: lr, 0.0, 1.0, update)
    parameter[:2].float().sum().backward()  # type: ignore[no-untyped-call]
    masters.step(0)
    assert masters.unchanged_fraction() == lost


def test_a_non_finite_gradient_stops_before_any_weight_moves() -> None:
    parameter = nn.Parameter(torch.ones(2))
    masters = optimizer(parameter, lr=0.1)
    (parameter * torch.tensor([1.0, float("nan")])).sum().backward()
    with pytest.raises(NonFiniteGradient, match="step 7"):
        masters.step(7)
    assert masters.masters[0].tolist() == [1.0, 1.0]
    assert parameter.tolist() == [1.0, 1.0]


def test_the_first_gradient_is_kept_as_it_came_and_the_sum_is_that_in_fp32() -> None:
    """In bf16 the second term would vanish: 256 + 1 is 256."""
    model = Model()
    parameter = model.parameters[0]
    (parameter * 256.0).sum().backward()  # type: ignore[no-untyped-call]
    model.optimizer.gradients.gather()
    (first,) = (g for g in model.optimizer.gradients.tensors if g is not None)
    assert first.dtype == torch.bfloat16
    (parameter * 1.0).sum().backward()  # type: ignore[no-untyped-call]
    model.optimizer.gradients.gather()
    (both,) = (g for g in model.optimizer.gradients.tensors if g is not None)
    assert both.dtype == torch.float32
    assert both.unique().tolist() == [257.0]
    assert parameter.grad is None


def test_parameters_do_not_keep_their_optimizer() -> None:
    """Else the shared memory that they are views of would stay attached."""
    parameter = nn.Parameter(torch.ones(8))
    bucket = weakref.ref(optimizer(parameter, lr=0.1).buckets[0])
    gc.collect()
    assert bucket() is None
    parameter.sum().backward()  # type: ignore[no-untyped-call]
    assert parameter.grad is not None


def test_a_buckets_gradients_are_gathered_during_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the gradients of a pass would be kept twice when it ends."""
    monkeypatch.setattr("grpo_trainer.optim.buckets.PART_ELEMENTS", 64)
    matrices = [nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16)) for _ in range(3)]
    masters = MasterOptimizer(matrices, lambda _: 0.1, 0.0, 1.0)
    assert len(masters.buckets) == 3
    at_first: list[bool] = []
    matrices[0].register_hook(
        lambda _: at_first.append(any(p.grad is not None for p in matrices[1:]))
    )
    for _ in range(3):
        value = torch.ones(8, 8, dtype=torch.bfloat16)
        for matrix in matrices:
            value = value @ matrix
        value.sum().backward()  # type: ignore[no-untyped-call]
        assert not any(p.grad is not None for p in matrices)
    assert at_first == [False] * 3
    assert all(gradient is not None for gradient in masters.gradients.tensors)


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [*((variant, torch.bfloat16) for variant in VARIANTS), ("adamw", torch.float16)],
)
def test_a_write_puts_the_rounded_masters_into_the_same_memory_each_time(
    variant: str, dtype: torch.dtype
) -> None:
    """Write again: a restarted server has lost the first write."""
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
    return {str(number): tensor.detach() for number, tensor in enumerate(tensors)}


def test_a_write_copies_the_staged_result_and_does_not_round_again() -> None:
    """Otherwise the pause would read the fp32 master weights."""
    model = Model()
    model.step(0)
    with torch.no_grad():
        model.optimizer.masters[0].add_(1.0)
    model.optimizer.write_into_parameters()
    assert model.optimizer.unwritten_parameters() == 1


@pytest.mark.parametrize(
    ("variant", "dtype", "micro_batches", "staged"),
    [
        ("adamw", torch.bfloat16, 1, {"the gradient's"}),
        ("adamw", torch.bfloat16, 2, {"its own"}),
        ("adamw", torch.float32, 1, set()),
        ("adamw, bf16 stochastic", torch.bfloat16, 1, set()),
    ],
)
def test_a_step_stages_only_masters_of_another_type_in_the_gradients_memory_if_it_fits(
    variant: str, dtype: torch.dtype, micro_batches: int, staged: set[str]
) -> None:
    model = Model(VARIANTS[variant](), dtype)
    model.gather(0, micro_batches)
    buckets = model.optimizer.buckets
    gradients = {b.gradient.data_ptr() for b in buckets if b.gradient is not None}
    model.optimizer.step(0)
    assert all(bucket.gradient is None for bucket in buckets)
    kept = [bucket.staged for bucket in buckets if bucket.staged is not None]
    assert {
        "the gradient's" if copy.data_ptr() in gradients else "its own" for copy in kept
    } == staged
    model.optimizer.write_into_parameters()
    assert all(bucket.staged is None for bucket in buckets)


MASTERS = ("--master-dtype", "bfloat16")
EIGHT_BITS = ("--optimizer", "adamw_8bit")
WEIGHTS = [torch.zeros(8, dtype=torch.bfloat16)]


def settings(*flags: str) -> TrainerSettings:
    words = ["--model", "m", "--mode", "shared_vllm", *flags]
    return load_settings(CommandLine, words).settings()


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ((), ("AdamW32", torch.float32, None)),
        (EIGHT_BITS, ("AdamW8bit", torch.float32, None)),
        ((*EIGHT_BITS, *MASTERS), ("AdamW8bit", torch.bfloat16, "StochasticRounding")),
        ((*MASTERS, "--rounding", "nearest"), ("AdamW32", torch.bfloat16, None)),
    ],
)
def test_options_choose_the_parts_and_rounding_to_the_nearest_warns(
    flags: tuple[str, ...], parts: tuple[str, torch.dtype, str | None]
) -> None:
    with capture_logs() as logs:
        update = build_update(settings(*flags), WEIGHTS)
    rounding = None if update.rounding is None else type(update.rounding).__name__
    assert (type(update.rule).__name__, update.dtype, rounding) == parts
    assert [event["log_level"] for event in logs] == ["warning"] * ("nearest" in flags)
    optimizer = build_optimizer(qwen(torch.bfloat16), settings(*flags))
    assert {master.dtype for master in optimizer.masters} == {parts[1]}


def test_master_weights_in_bfloat16_need_weights_in_bfloat16() -> None:
    with pytest.raises(UnusableOptimizer, match="weights are in float32"):
        build_optimizer(qwen(), settings(*MASTERS))


def take_tiny_step(policy: Any, optimizer: MasterOptimizer) -> float:
    """Gradient norm of a mean over 500,000 tokens, of which this batch has few."""
    whole = ragged_batch()
    micros = [replace(m, token_weight=m.token_weight * 2e-5) for m in whole.micro_batches]
    batch = replace(whole, micro_batches=micros)
    accumulate_gradients(policy, batch, GRPO, 0, optimizer=optimizer)
    return optimizer.step(0)


@pytest.mark.parametrize("adapts", [False, True], ids=["whole model", "adapter"])
def test_gradients_too_small_for_float16_reach_the_optimizer(adapts: bool) -> None:
    """Without scaling, 54 % of the model's gradients are 0, and the norm is wrong by 15 %."""
    half = qwen(torch.float16)
    exact = copy.deepcopy(half).float()
    norms = []
    for policy in (half, exact):
        torch.manual_seed(1)  # for the adapter's random weights
        trained = with_adapter(policy, LORA) if adapts else policy
        norms.append(take_tiny_step(trained, build_optimizer(trained, settings())))
    assert norms[0] == pytest.approx(norms[1], rel=0.002)


def scaled_by(scale: float) -> tuple[Any, MasterOptimizer, LossScale]:
    """An optimizer of a float16 policy, one step before the scale doubles."""
    policy = qwen(torch.float16)
    optimizer = build_optimizer(policy, settings())
    assert optimizer.loss_scale is not None
    optimizer.loss_scale.record = ScaleRecord(value=scale, good_steps=GROWTH_STEPS - 1)
    return policy, optimizer, optimizer.loss_scale


def test_a_batch_whose_scaled_gradients_overflow_is_computed_again_with_half_the_scale() -> None:
    policy, overflowed, scale = scaled_by(2.0**40)
    norm = take_tiny_step(policy, overflowed)
    found = scale.value
    assert 2.0**16 < found < 2.0**40
    assert scale.record.good_steps == 1
    policy, steady, scale = scaled_by(found)
    assert take_tiny_step(policy, steady) == norm
    assert differing(named(overflowed.masters), named(steady.masters)) == []
    assert scale.record == ScaleRecord(value=2 * found)


def test_gradients_that_are_finite_at_no_scale_are_refused_and_leave_the_scale_as_it_was() -> None:
    policy, optimizer, scale = scaled_by(2.0**10)
    before = scale.record
    policy.model.norm.weight.register_hook(lambda g: torch.full_like(g, float("nan")))
    with pytest.raises(NonFiniteGradient, match="step 0: the gradient norm is nan"):
        take_tiny_step(policy, optimizer)
    assert scale.record == before


def test_only_matrices_have_weight_decay() -> None:
    """As in Hugging Face's Trainer, norms and biases have none."""
    matrix, norm = (torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,)))
    optimizer = MasterOptimizer([matrix, norm], lambda _: 0.1, weight_decay=0.5, max_grad_norm=1.0)
    (0.0 * (matrix.sum() + norm.sum())).backward()  # type: ignore[no-untyped-call]
    optimizer.step(0)
    optimizer.write_into_parameters()
    assert torch.equal(norm, torch.ones(2))
    torch.testing.assert_close(matrix.detach(), torch.full((2, 2), 0.95))
