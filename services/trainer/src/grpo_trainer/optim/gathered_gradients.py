"""The gradients of one step: taken over from the parameters as they appear, and added up."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn


class GatheredGradients:
    """A parameter's gradient is gathered in fp32 from the second backward pass on. The first one is
    kept as it came, which in bf16 is half as large and loses nothing: it was computed in bf16.

    Args:
        parameters: each gives up its `.grad` as soon as that is complete
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.tensors: list[Tensor | None] = [None] * len(parameters)
        for index, parameter in enumerate(parameters):
            hook = partial(self._take_over, index)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def norm(self) -> Tensor:
        """L2 norm over all of them, in fp32: a scalar where they are."""
        norms = [
            torch.linalg.vector_norm(gradient, dtype=torch.float32)
            for gradient in self.tensors
            if gradient is not None
        ]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    def pop(self, index: int) -> Tensor | None:
        """That of a parameter, which is the caller's from now on; None where there was none."""
        gradient, self.tensors[index] = self.tensors[index], None
        return gradient

    def clear(self) -> None:
        """Forget what was gathered: it is computed again."""
        self.tensors = [None] * len(self.tensors)

    def _take_over(self, index: int, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        held = self.tensors[index]
        self.tensors[index] = gradient if held is None else held.float().add_(gradient)
