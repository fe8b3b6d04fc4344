"""Float32 matrix products on x86 CPUs by oneDNN.

torch computes these with MKL, which does not use the AVX-512 of AMD's processors: oneDNN, which is
part of torch too and computes its 16-bit products, takes less than half as long there.

Legend: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from grpo_trainer.model.policy import CausalLM

_IS_X86 = platform.machine() == "x86_64"
"""Other processors were not measured."""
_WORTHWHILE = 1 << 16
"""Elements of a weight. With smaller ones the call takes longer than the product."""


def uses_onednn(tensor: Tensor) -> bool:
    """Whether products with this tensor are computed by oneDNN because of this file."""
    return _IS_X86 and tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `torch.nn.functional.linear`, but without a gradient: [M, K], [N, K], [N] → [M, N]."""
    if not uses_onednn(inputs) or not inputs.numel():  # oneDNN has no products of no rows
        return functional.linear(inputs, weight, bias)
    found: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return found


def use_onednn(model: CausalLM) -> None:
    """Let oneDNN compute the model's linear layers, where it computes them faster."""
    for module in model.modules():
        if type(module) is nn.Linear and _is_worthwhile(module.weight):
            module.__class__ = OneDnnLinear


def _is_worthwhile(weight: Tensor) -> bool:
    return uses_onednn(weight) and weight.numel() >= _WORTHWHILE


class OneDnnLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        found: Tensor = _differentiable(input, self.weight, self.bias)
        return found


# An operator of its own, because torch.compile takes the weights of oneDNN's for constants.
@torch.library.custom_op("grpo::linear", mutates_args=())
def _differentiable(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear(inputs, weight, bias)


_differentiable.register_fake(
    lambda inputs, weight, _: inputs.new_empty(*inputs.shape[:-1], len(weight))
)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], **__: Any) -> None:
    of_inputs, of_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(inputs[0] if of_weight else None, inputs[1] if of_inputs else None)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """[..., N] → the gradients of the inputs, the weight and the bias, as far as needed."""
    inputs, weight = ctx.saved_tensors
    rows = gradient.flatten(0, -2)  # [M, N]
    of_inputs = of_weight = None
    if weight is not None:
        of_inputs = _differentiable(gradient, weight.T, None)
    if inputs is not None:
        of_weight = _differentiable(rows.T.contiguous(), inputs.flatten(0, -2).T, None)
    return of_inputs, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


_differentiable.register_autograd(_backward, setup_context=_save)
