"""The fused head's arithmetic by liger-kernel's Triton kernel (arXiv 2410.10989).

The kernel answers in the type of its logits and knows no temperature: it gets them in float32 and
scaled. It reads them twice and writes the gradient in their place.
"""

from __future__ import annotations

from torch import Tensor

from grpo_trainer.model.fused_head import Arithmetic

_NO_TARGET = -100
_PLAIN = (None, _NO_TARGET, 0.0, 0.0, "none", None, False)
"""No weights, z-loss, smoothing, reduction or cap."""


def liger_arithmetic() -> Arithmetic:
    return Arithmetic(_logprobs, _logits_gradient)


def _logprobs(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """[K] log-probabilities of the targets, twice: the gradient needs no logsumexp."""
    loss, _ = _cross_entropy(_scaled(logits, temperature), targets)
    return -loss, -loss


def _logits_gradient(
    logits: Tensor, targets: Tensor, temperature: Tensor, logsumexp: Tensor, gradient: Tensor
) -> Tensor:
    """[K] gradient of the log-probabilities → [K, V] of the logits, in their type."""
    del logsumexp
    _, of_loss = _cross_entropy(_scaled(logits, temperature).requires_grad_(), targets)
    return of_loss.detach().mul_(-(gradient / temperature).unsqueeze(-1)).to(logits.dtype)


def _scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    return logits.float() / temperature.unsqueeze(-1)  # [K, V]


def _cross_entropy(scaled: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """[K] losses, and [K, V] their gradient in place of `scaled`, where that requires one."""
    from liger_kernel.ops.cross_entropy import cross_entropy_forward

    loss, _, _, _, in_place = cross_entropy_forward(scaled, targets, *_PLAIN)
    return loss, in_place
