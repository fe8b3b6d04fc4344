"""Float32 matrix products by oneDNN, on CPUs where it is faster than MKL.

Legend: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from grpo_core import cpu
from grpo_trainer.model.policy import CausalLM

SMALLEST = 1 << 13
"""Elements of a weight. With smaller ones, MKL is as fast for up to 300 rows."""


def computes(tensor: Tensor) -> bool:
    """Whether oneDNN computes products with this tensor."""
    is_float32 = tensor.dtype == torch.float32 and tensor.device.type == "cpu"
    return is_float32 and cpu.CPU.is_faster_with_onednn


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `torch.nn.functional.linear`, without a gradient: [M, K], [N, K], [N] → [M, N]."""
    if not computes(inputs) or not inputs.numel():  # oneDNN refuses K = 0
        return functional.linear(inputs, weight, bias)
    found: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return found


class OneDnnLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        # Its output is no view, because some models change it in place.
        rows: Tensor = _differentiable(input.reshape(-1, self.in_features), self.weight, self.bias)
        return rows.view(*input.shape[:-1], self.out_features)


def enable(model: CausalLM) -> None:
    """Let oneDNN compute the large linear layers of the model, if it is faster."""
    for module in model.modules():
        if type(module) is nn.Linear and _is_worthwhile(module.weight):
            module.__class__ = OneDnnLinear


def disable(model: CausalLM) -> None:
    for module in model.modules():
        if isinstance(module, OneDnnLinear):
            module.__class__ = nn.Linear  # type: ignore[assignment]


def _is_worthwhile(weight: Tensor) -> bool:
    return computes(weight) and weight.numel() >= SMALLEST


# An operator of its own, because torch.compile treats the weight of oneDNN's as a constant.
@torch.library.custom_op("grpo::linear", mutates_args=())
def _differentiable(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear(inputs, weight, bias)


@_differentiable.register_fake
def _shape(inputs: Tensor, weight: Tensor, _: Tensor | None) -> Tensor:
    # len() would compile the number of rows in.
    return inputs.new_empty(inputs.shape[0], weight.shape[0])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], **__: Any) -> None:
    of_inputs, of_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(inputs[0] if of_weight else None, inputs[1] if of_inputs else None)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """[M, N] → the gradients of the inputs, the weight and the bias, as far as needed."""
    inputs, weight = ctx.saved_tensors
    return (
        None if weight is None else _differentiable(gradient, weight.T, None),
        None if inputs is None else _differentiable(gradient.T, inputs.T, None),
        gradient.sum(0) if ctx.needs_input_grad[2] else None,
    )


_differentiable.register_autograd(_backward, setup_context=_save)
