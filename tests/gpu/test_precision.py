"""On the GPU every fast path gives the plain path's results, and every optimizer its library's.

The same comparisons as in tests/unit/trainer, for code that needs a GPU: flash attention, compiled
kernels, bitsandbytes' and torch's fused kernels.
"""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo_core.settings import load_settings
from grpo_core.tree.objectives import GRPO
from grpo_core.tree.trainer import ForwardOptions
from grpo_core.tree.trainer_command import CommandLine
from grpo_trainer.data.cuts import by_prefix
from grpo_trainer.learner import accumulate_gradients
from grpo_trainer.model.forward import ForwardPass, build_forward_pass, plain_forward
from grpo_trainer.model.packed_attention import GatheredKeys
from grpo_trainer.model.packing import AttentionCalls, Layout, PackedBounds, Part, packed
from grpo_trainer.optim.digests import WeightDigests, digests_of
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.optim.master_update import build_update
from grpo_trainer.ranks import ALONE, Orders
from tests.unit.trainer.forward_rig import qwen, ragged_batch

DEVICE = torch.device("cuda", 0)
BFLOAT16_NOISE = 0.05
"""Bound on the mean |difference| of logprobs."""
SIZE = 3_000_001
"""Size of a parameter: over 1,024 blocks of any kernel, the last one partly filled."""
STEPS = 5
FAST: list[dict[str, Any]] = [
    dict(zip(("packing", "fused_head", "compile"), choice, strict=True))
    for choice in itertools.product(("on", "off"), ("on", "off"), (True, False))
]


def policy(dtype: torch.dtype) -> Any:
    """A model with heads of width 64, which flash attention supports; two queries for each key."""
    return qwen(dtype, hidden_size=256, intermediate_size=512, initializer_range=0.05).to(DEVICE)


def outcome(model: Any, forward: ForwardPass) -> tuple[Tensor, Tensor]:
    """Logprobs of the trained tokens, and all gradients in one vector."""
    micro = ragged_batch().micro_batches[0].to(DEVICE)
    model.zero_grad(set_to_none=True)
    logp = forward(model, micro).logp[micro.token_weight > 0]
    weights = torch.linspace(-1, 2, len(logp), device=DEVICE)
    (weights * logp).sum().backward()  # type: ignore[no-untyped-call]
    gradients = torch.cat([p.grad.float().flatten() for p in model.parameters()])
    return logp.detach(), gradients


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0))


@pytest.mark.parametrize("options", FAST, ids=lambda o: "-".join(f"{k}:{v}" for k, v in o.items()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fast_paths_say_what_the_plain_one_says(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    model = policy(dtype)
    expected = outcome(model, plain_forward)
    found = outcome(model, build_forward_pass(model, ForwardOptions(**options)))
    assert float(expected[0].std()) > 0.05
    if dtype is torch.float32:
        torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
        assert cosine(found[1], expected[1]) > 0.99999
    else:
        assert float((found[0] - expected[0]).abs().mean()) < BFLOAT16_NOISE
        assert cosine(found[1], expected[1]) > 0.99
    assert float(found[1].norm()) == pytest.approx(float(expected[1].norm()), rel=0.03)


def test_what_sequences_see_of_each_other_would_show() -> None:
    """The negative control: a packed row treated as one sequence."""
    model = policy(torch.bfloat16)
    expected, _ = outcome(model, plain_forward)
    options = ForwardOptions(packing="on", fused_head="off", compile=False)
    forward = build_forward_pass(model, options)

    as_one = replace(forward, layout=Layout(lambda m: _without_bounds(packed(m)), by_prefix))
    found, _ = outcome(model, as_one)
    assert float((found - expected).abs().mean()) > 2 * BFLOAT16_NOISE


def _without_bounds(inputs: Any) -> Any:
    places = torch.arange(inputs.arguments["input_ids"].shape[1])
    bounds = torch.tensor([0, len(places)], dtype=torch.int32, device=DEVICE)
    inputs.arguments.update(
        bounds=PackedBounds(bounds, bounds, len(places), len(places), None),
        attention_calls=AttentionCalls([Part(places, shared=0)], DEVICE),
        position_ids=places.to(DEVICE).unsqueeze(0),
    )
    return inputs


def test_gradients_of_shared_keys_are_the_same_each_time() -> None:
    places = packed(ragged_batch().micro_batches[0].to(DEVICE)).arguments["bounds"].key_places
    drawn = torch.Generator(DEVICE).manual_seed(0)
    upstream = torch.randn(len(places.row), 2, 64, generator=drawn, device=DEVICE)
    keys = torch.zeros(len(places.edges) - 1, 2, 64, device=DEVICE, requires_grad=True)
    found = [
        torch.autograd.grad(GatheredKeys.apply(keys, *places), keys, upstream)[0]  # type: ignore[no-untyped-call]
        for _ in range(5)
    ]
    expected = torch.zeros_like(keys).cpu().index_add(0, places.row.cpu(), upstream.cpu())
    assert all(torch.equal(each.cpu(), expected) for each in found)


def test_a_step_of_gradients_on_the_gpu_is_that_on_the_host() -> None:
    on_gpu, on_host = policy(torch.float32), policy(torch.float32).cpu()
    found = accumulate_gradients(on_gpu, ragged_batch(tokens=30), GRPO, 0)
    expected = accumulate_gradients(on_host, ragged_batch(tokens=30), GRPO, 0)
    assert found.loss == pytest.approx(expected.loss, rel=1e-3, abs=1e-5)
    torch.testing.assert_close(found.tokens.logp, expected.tokens.logp, rtol=1e-3, atol=1e-3)


def test_saved_weights_have_the_digests_that_they_have_on_the_host() -> None:
    drawn = torch.Generator(DEVICE).manual_seed(0)
    weights = [torch.randn(size, generator=drawn, device=DEVICE) for size in (SIZE, 2**25, 3)]
    digests = WeightDigests(weights, Orders(ALONE))
    digests.begin()
    assert digests.finish() is None
    assert digests.finish_saved() == digests_of([each.cpu() for each in weights], parts=1)
    assert digests.finish_saved() is None


def optimizer(*flags: str, lr: float = 1e-3) -> tuple[nn.Parameter, MasterOptimizer]:
    words = ["--model", "m", "--mode", "shared_vllm", "--lr", str(lr), *flags]
    settings = load_settings(CommandLine, words, at_start=True).settings()
    drawn = torch.Generator(DEVICE).manual_seed(0)
    weights = 0.02 * torch.randn(SIZE, generator=drawn, device=DEVICE)
    parameter = nn.Parameter(weights.to(torch.bfloat16))
    update = build_update(settings, [parameter])
    return parameter, MasterOptimizer([parameter], lambda _: lr, 0.01, 1.0, update)


def stepped(*flags: str, lr: float = 1e-3, steps: int = STEPS) -> tuple[Tensor, Tensor, Tensor]:
    """(weights before, master weights, served weights) after steps on gradients from a seed."""
    parameter, owner = optimizer(*flags, lr=lr)
    before = parameter.detach().clone()
    for step in range(steps):
        drawn = torch.Generator(DEVICE).manual_seed(step)
        factors = torch.randn(SIZE, generator=drawn, device=DEVICE, dtype=torch.bfloat16)
        (parameter * factors).sum().backward()  # type: ignore[no-untyped-call]
        owner.step(step)
        owner.write_into_parameters()
    return before, owner.masters[0], parameter.detach()


def test_moments_in_eight_bits_move_the_weights_alike() -> None:
    before, plain, _ = stepped("--optimizer", "adamw")
    _, small, _ = stepped("--optimizer", "adamw_8bit")
    moved, expected = small - before, plain - before
    assert cosine(moved, expected) > 0.98
    assert float(moved.norm()) == pytest.approx(float(expected.norm()), rel=0.05)


@pytest.mark.parametrize("rule", ["adamw", "adamw_8bit"])
def test_bfloat16_masters_keep_small_updates_where_they_are_rounded_at_random(rule: str) -> None:
    """At a learning rate of 1e-6, rounding to the nearest loses nearly all updates."""
    flags = ("--optimizer", rule, "--master-dtype", "bfloat16")
    before, kept, _ = stepped(*flags, lr=1e-6, steps=20)
    _, exact, _ = stepped("--optimizer", rule, lr=1e-6, steps=20)
    _, lost, _ = stepped(*flags, "--rounding", "nearest", lr=1e-6, steps=20)
    wanted = exact - before
    for masters, bound in ((kept, 0.1), (lost, 0.8)):
        moved = (masters - before).float()
        share = float((moved * wanted).sum() / wanted.square().sum())
        assert (abs(share - 1) < bound) == (masters is kept), share


def requested_bytes() -> int:
    """`memory_allocated` also counts the rest of a reused block, up to a megabyte per tensor."""
    requested: int = torch.cuda.memory_stats()["requested_bytes.all.current"]
    return requested


def test_peak_memory_is_the_sum_of_its_parts() -> None:
    """Master weights and moments: 12 bytes per weight for adamw, 6 for the smallest variant."""
    for flags, expected in (
        (("--optimizer", "adamw"), 12.0),
        (("--optimizer", "adamw_8bit"), 6.1),
        (("--optimizer", "adamw_8bit", "--master-dtype", "bfloat16"), 4.1),
    ):
        gc.collect()
        torch.cuda.empty_cache()
        before = requested_bytes()
        parameter, owner = optimizer(*flags)
        (parameter * 2).sum().backward()  # type: ignore[no-untyped-call]
        owner.step(0)
        owner.write_into_parameters()
        held = (requested_bytes() - before) / SIZE - 2  # the parameter itself
        assert held == pytest.approx(expected, rel=0.05), flags
        del parameter, owner
