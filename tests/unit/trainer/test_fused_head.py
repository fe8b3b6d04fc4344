"""The head in parts: the numbers of all logits at once, and never all logits at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig

from grpo_trainer import fused_head
from grpo_trainer.fused_head import linear_logprobs
from grpo_trainer.policy import model_of
from tests.unit.trainer.forward_rig import SMALL, qwen

ROWS, WIDTH, VOCABULARY = 20, 16, 30


class Case:
    """Random rows and a head; `plain` is the computation of `token_logprobs`."""

    def __init__(self, dtype: torch.dtype = torch.float32, bias: bool = False) -> None:
        torch.manual_seed(0)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype)
        self.hidden = (3 * torch.randn(ROWS, WIDTH)).to(dtype).requires_grad_()
        self.targets = torch.randint(VOCABULARY, (ROWS,))
        self.temperature = torch.linspace(0.5, 2, ROWS)
        self.weights = torch.linspace(-1, 2, ROWS)

    def on_a_grid(self) -> Case:
        """So coarse that float32 holds every partial sum of a logit: in whatever order a processor
        adds them up, it then rounds the same number to bfloat16."""
        with torch.no_grad():
            for values, step in ((self.hidden, 2**-3), (self.head.weight, 2**-6)):
                values.copy_((values / step).round() * step)
        return self

    def plain(self) -> Tensor:
        scaled = self.head(self.hidden).float() / self.temperature.unsqueeze(-1)
        return -functional.cross_entropy(scaled, self.targets, reduction="none")

    def fused(self, rows: int) -> Tensor:
        limit = rows * VOCABULARY
        return linear_logprobs(
            self.hidden, self.head, self.targets, self.temperature, chunk_logits=limit
        )

    def gradients(self, logp: Tensor) -> list[Tensor]:
        wanted = [self.hidden, *(p for p in self.head.parameters() if p.requires_grad)]
        return list(torch.autograd.grad((self.weights * logp).sum(), wanted))


@pytest.mark.parametrize(("rows", "bias"), [(1, False), (3, True), (100, True)])
def test_values_and_gradients_are_those_of_all_logits_at_once(rows: int, bias: bool) -> None:
    case = Case(bias=bias)
    logp, expected = case.fused(rows), case.plain()
    torch.testing.assert_close(logp, expected, rtol=1e-6, atol=1e-6)
    for found, gradient in zip(case.gradients(logp), case.gradients(expected), strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-6)


def test_bfloat16_rounds_at_the_same_places_as_the_plain_way() -> None:
    """The logits, once; a certain target's gradient is not lost in a difference."""
    case = Case(torch.bfloat16).on_a_grid()
    logp, expected = case.fused(3), case.plain()
    assert torch.equal(logp, expected)
    for found, gradient in zip(case.gradients(logp), case.gradients(expected), strict=True):
        size = float(gradient.abs().max())
        torch.testing.assert_close(found.float(), gradient.float(), rtol=0.01, atol=0.01 * size)


def test_many_rows_add_up_in_float32() -> None:
    """One row at a time, in bfloat16: a sum that rounded every time would stop growing."""
    rows = 2000
    head = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    nn.init.zeros_(head.weight)
    hidden = torch.ones(rows, 2, dtype=torch.bfloat16)
    ones = torch.ones(rows)
    logp = linear_logprobs(hidden, head, torch.zeros(rows, dtype=torch.long), ones, chunk_logits=2)
    (gradient,) = torch.autograd.grad(logp.sum(), head.weight)
    assert gradient.float().tolist() == [[1000, 1000], [-1000, -1000]]


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation computed; a view computes none."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
        found = function(*args, **(kwargs or {}))
        shared = {t.data_ptr() for t in args if isinstance(t, Tensor)}
        if isinstance(found, Tensor) and found.data_ptr() not in shared:
            self.elements = max(self.elements, found.numel())
        return found


def test_no_more_logits_exist_than_allowed_and_a_frozen_head_gets_no_gradient() -> None:
    case = Case()
    with Largest() as largest:
        case.gradients(case.plain())
    assert largest.elements == ROWS * VOCABULARY
    with Largest() as largest:
        case.gradients(case.fused(1))
    assert largest.elements == WIDTH * VOCABULARY  # the weight's gradient
    case.head.requires_grad_(False)
    with Largest() as largest:
        case.gradients(case.fused(1))
    assert largest.elements == ROWS * WIDTH < WIDTH * VOCABULARY


REFUSED = {
    "final_logit_softcapping = 30": Gemma2Config(**SMALL),
    "logit_scale = 0.0625": CohereConfig(**SMALL),
    "logits_scaling = 8": GraniteConfig(**SMALL, logits_scaling=8.0),
}


@pytest.mark.parametrize("told", REFUSED)
def test_a_change_of_the_logits_by_the_model_is_named(told: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(REFUSED[told])
    assert told in "; ".join(fused_head.obstacles(model))


def test_an_adapter_on_the_head_is_named() -> None:
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["lm_head"])
    policy = get_peft_model(qwen(tie_word_embeddings=False), config)
    (told,) = fused_head.obstacles(model_of(policy))
    assert "its head is a peft.tuners.lora.layer.Linear" in told
