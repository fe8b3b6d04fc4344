"""The fused head gives the results of all logits at once without storing them at once."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_trainer.model.fused_head import (
    EAGER,
    UNCHANGED,
    HeadArithmetic,
    LogitChange,
    _add_product,
    linear_logprobs,
)
from grpo_trainer.model.logprobs import TokenValues, values_of

ROWS, WIDTH, VOCABULARY = 20, 16, 30


CHANGES = {
    "unchanged": UNCHANGED,
    "scaled": LogitChange(scale=0.25),
    "capped": LogitChange(scale=0.5, cap=2.0),
}


class Case:
    """Random rows and a head; `plain` computes like `token_values`. Logprobs and entropies both
    count in the gradient."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        bias: bool = False,
        change: LogitChange = UNCHANGED,
    ) -> None:
        torch.manual_seed(0)
        self.change = change
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype)
        self.hidden = (3 * torch.randn(ROWS, WIDTH)).to(dtype).requires_grad_()
        self.targets = torch.randint(VOCABULARY, (ROWS,))
        self.temperature = torch.linspace(0.5, 2, ROWS)
        self.weights = torch.linspace(-1, 2, ROWS)

    def plain(self) -> TokenValues:
        scaled = self.change(self.head(self.hidden).float()) / self.temperature.unsqueeze(-1)
        return values_of(scaled, self.targets, differentiates_entropy=True)

    def fused(self, rows: int, arithmetic: HeadArithmetic = EAGER) -> TokenValues:
        terms = (self.targets, self.temperature, arithmetic, self.change, rows * VOCABULARY)
        logp, entropy = linear_logprobs(self.hidden, self.head, *terms)
        return TokenValues(logp, entropy, above=torch.full_like(logp, torch.nan))

    def gradients(self, values: TokenValues, with_entropy: bool) -> list[Tensor]:
        wanted = [self.hidden, *self.head.parameters()]
        total = (self.weights * values.logp).sum()
        if with_entropy:
            total = total - (self.weights.flip(0) * values.entropy).sum()
        return list(torch.autograd.grad(total, wanted))

    def require_equal(self, values: TokenValues, with_entropy: bool) -> None:
        """Compare values and gradients with the plain computation, up to the type's rounding."""
        expected = self.plain()
        coarse = self.head.weight.dtype is torch.bfloat16
        near = {"rtol": 2e-2, "atol": 2e-2} if coarse else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(values.logp, expected.logp, **near)
        if with_entropy:
            torch.testing.assert_close(values.entropy, expected.entropy, **near)
            near["atol"] *= 10  # a sum over the vocabulary
        sides = (self.gradients(side, with_entropy) for side in (values, expected))
        for found, gradient in zip(*sides, strict=True):
            assert float(gradient.std()) > 1e-3
            torch.testing.assert_close(found, gradient, **near)


@pytest.mark.parametrize(("rows", "bias"), [(1, False), (3, True), (100, True)])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_values_and_gradients_are_those_of_all_logits_at_once(
    rows: int, bias: bool, with_entropy: bool, change: LogitChange
) -> None:
    case = Case(bias=bias, change=change)
    case.require_equal(case.fused(rows), with_entropy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_so_are_those_of_the_code_that_is_compiled_once(
    dtype: torch.dtype, change: LogitChange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced, and run operator by operator. The logits of the first rows serve both passes."""
    traced: list[str] = []

    def trace(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        traced.append(graph.code)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=trace))
    case, arithmetic = Case(dtype, change=change), HeadArithmetic.compiled()
    torch.compiler.reset()
    for rows, with_entropy in itertools.product((8, 3), (False, True)):
        case.require_equal(case.fused(rows, arithmetic), with_entropy)
    torch.compiler.reset()
    assert len(traced) == 3  # logprobs; their gradient; that of logprobs and entropies
    assert "scatter" not in "".join(traced)  # it would be a kernel of its own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_so_are_those_of_compiled_code_that_falls_back_to_eager(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with TORCHDYNAMO_DISABLE=1, or after too many compilations."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    case = Case(dtype)
    case.require_equal(case.fused(8, HeadArithmetic.compiled()), with_entropy=True)


def test_many_rows_add_up_in_float32() -> None:
    """One row at a time, in bfloat16: a sum that is rounded each time would stop growing."""
    rows = 2000
    head = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    nn.init.zeros_(head.weight)
    hidden = torch.ones(rows, 2, dtype=torch.bfloat16)
    ones = torch.ones(rows)
    logp, _ = linear_logprobs(
        hidden, head, torch.zeros(rows, dtype=torch.long), ones, chunk_logits=2
    )
    (gradient,) = torch.autograd.grad(logp.sum(), head.weight)
    assert gradient.float().tolist() == [[1000, 1000], [-1000, -1000]]


def test_products_of_bfloat16_are_not_rounded_before_they_are_added() -> None:
    """Rounded ones would be off by 2^-9 of each, here 200 times the bound."""
    torch.manual_seed(0)
    left = torch.randn(64, 8, VOCABULARY, dtype=torch.bfloat16)
    right = torch.randn(64, 8, WIDTH, dtype=torch.bfloat16)
    total = torch.zeros(VOCABULARY, WIDTH)
    for part in zip(left, right, strict=True):
        _add_product(total, *part)
    exact = left.double().flatten(0, 1).T @ right.double().flatten(0, 1)
    assert torch.dist(total.double(), exact) < 1e-5 * exact.norm()


class Largest(TorchDispatchMode):
    """Size of the largest tensor that any operation computes; views do not count."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
        found = function(*args, **(kwargs or {}))
        shared = {t.data_ptr() for t in args if isinstance(t, Tensor)}
        if isinstance(found, Tensor) and found.data_ptr() not in shared:
            self.elements = max(self.elements, found.numel())
        return found


def test_no_more_logits_exist_than_allowed() -> None:
    case = Case()
    with Largest() as largest:
        case.gradients(case.plain(), with_entropy=True)
    assert largest.elements == ROWS * VOCABULARY
    with Largest() as largest:
        case.gradients(case.fused(1), with_entropy=True)
    assert largest.elements == WIDTH * VOCABULARY  # the weight's gradient
