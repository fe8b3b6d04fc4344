"""Computes logprobs of given tokens, and entropies, from hidden states, without storing all logits
at once.

With a vocabulary of 150,000 tokens the logits take 600 kB per position in float32, and the plain
way holds several copies of them for the backward pass. Here they exist for some rows at a time:
once for the logprobs, and again for the gradient. Values equal those of the plain way.

Legend: K rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from grpo_trainer.model import onednn
from grpo_trainer.model.policy import CausalLM

CHUNK_LOGITS = 2**27
"""Number of logits that exist at a time: half a GB in float32. This gives enough rows for an
efficient matrix product on a GPU."""
CHUNK_LOGITS_ON_CPU = 2**24
"""64 MiB. More logits at a time are hardly faster, and fewer are slower."""
SUMMED_ELEMENTS = 2**23
"""Elements of the head's gradient that oneDNN computes at a time: 32 MiB."""

_CHANGES_LOGITS = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "output_logit_soft_cap",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
)
"""Options of a model's configuration that change its logits. The fused head does not
support them."""


def obstacles(model: CausalLM) -> list[str]:
    """Reasons why the fused head does not fit the model, as far as its configuration shows them.

    Args: model: the transformers model, without an adapter's wrapper.
    """
    config = model.config.get_text_config()
    found = [
        f"the model changes its logits by {name} = {value}"
        for name in _CHANGES_LOGITS
        if (value := getattr(config, name, None)) not in (None, 1.0)
    ]
    head = model.get_output_embeddings()
    kind = type(head)
    if kind not in (nn.Linear, onednn.OneDnnLinear):
        found.append(
            f"the model's head is a {kind.__module__}.{kind.__name__} instead of one matrix"
        )
    return found


@dataclass(frozen=True)
class HeadArithmetic:
    """The computations on the logits of some rows: [K, V] in the model's type. Both may overwrite
    the logits."""

    logprobs: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]

    @classmethod
    def compiled(cls) -> HeadArithmetic:
        """Each as one kernel, instead of several that exchange float32 copies."""
        return cls(
            torch.compile(_logprobs, dynamic=True), torch.compile(_logits_gradient, dynamic=True)
        )


def _logprobs(
    logits: Tensor, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """[K] logprobs of the targets, [K] entropies of the distributions, and [K] logsumexp of the
    scaled logits; float32."""
    scaled = logits.float().div_(temperature.unsqueeze(-1))  # [K, V]
    highest = scaled.amax(-1, keepdim=True)
    odds = scaled.sub_(highest).exp()
    total = odds.sum(-1)
    log_total = total.log()
    logp = scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - log_total
    entropy = log_total - torch.linalg.vecdot(odds, scaled) / total
    return logp, entropy, log_total + highest.squeeze(-1)


def _logits_gradient(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    logsumexp: Tensor,
    gradient: Tensor,
    of_entropy: Tensor | None,
) -> Tensor:
    """[K] gradients of logprobs and entropies → [K, V] gradient of the logits, in their type."""
    logps = logits.float().div_(temperature.unsqueeze(-1)).sub_(logsumexp.unsqueeze(-1))
    distribution = logps.exp() if of_entropy is not None else logps.exp_()
    factor = gradient.unsqueeze(-1)
    if of_entropy is not None:
        # dH/dx = -p (log p + H) and dlogp/dx = onehot - p
        entropy = -torch.linalg.vecdot(distribution, logps).unsqueeze(-1)
        distribution *= logps.add_(entropy).mul_(of_entropy.unsqueeze(-1)).add_(factor)
        factor = torch.ones_like(factor)
        one = -gradient
    else:
        one = torch.full_like(logsumexp, -1)
    # In float32, because bfloat16 would round the gradient of a nearly certain target to 0.
    distribution.scatter_add_(-1, targets.unsqueeze(-1), one[:, None])
    return distribution.mul_(-factor / temperature.unsqueeze(-1)).to(logits.dtype)


EAGER = HeadArithmetic(_logprobs, _logits_gradient)


def linear_logprobs(
    hidden: Tensor,
    head: nn.Linear,
    targets: Tensor,
    temperature: Tensor,
    arithmetic: HeadArithmetic = EAGER,
    chunk_logits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Logprob of each target, and entropy of each distribution, at its temperature: [K] float32
    each.

    Args:
        hidden: [K, H] in the head's type
        targets: [K] int64
        temperature: [K] float32
        chunk_logits: how many logits may exist at a time, but at least those of one row
    """
    if chunk_logits is None:
        chunk_logits = CHUNK_LOGITS_ON_CPU if hidden.device.type == "cpu" else CHUNK_LOGITS
    rows = max(1, chunk_logits // head.out_features)
    found: tuple[Tensor, Tensor] = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, targets, temperature, arithmetic, rows
    )
    return found


class _LinearLogprobs(torch.autograd.Function):
    """Stores its inputs and one logsumexp per row; computes the logits again for the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
        arithmetic: HeadArithmetic,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        logp = torch.empty(len(hidden), device=hidden.device)
        entropy, logsumexp = torch.empty_like(logp), torch.empty_like(logp)
        for part in _parts(len(hidden), rows):
            logits = onednn.linear(hidden[part], weight, bias)
            logp[part], entropy[part], logsumexp[part] = arithmetic.logprobs(
                logits, targets[part], temperature[part]
            )
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, logsumexp)
        ctx.arithmetic, ctx.rows = arithmetic, rows
        ctx.set_materialize_grads(False)  # None: the loss does not depend on it
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_logp: Tensor | None, of_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, logsumexp = ctx.saved_tensors
        gradient = torch.zeros_like(logsumexp) if of_logp is None else of_logp
        of_hidden = torch.empty_like(hidden)
        # Summed in float32, because each of the many parts would be rounded.
        of_weight = _zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = _zeros_like(bias) if ctx.needs_input_grad[2] else None
        for part in _parts(len(hidden), ctx.rows):
            of_logits = ctx.arithmetic.gradient(
                onednn.linear(hidden[part], weight, bias),
                targets[part],
                temperature[part],
                logsumexp[part],
                gradient[part],
                None if of_entropy is None else of_entropy[part],
            )
            of_hidden[part] = onednn.linear(of_logits, weight.T)
            if of_weight is not None:
                _add_product(of_weight, of_logits, hidden[part])
            if of_bias is not None:
                of_bias += of_logits.sum(0, dtype=torch.float32)
        return (
            of_hidden,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(bias.dtype),
            *(None,) * 4,
        )


def _parts(length: int, rows: int) -> Iterator[slice]:
    return (slice(start, start + rows) for start in range(0, length, rows))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += leftᵀ right: [V, H], [K, V], [K, H]. The product is not rounded before the sum."""
    if not total.is_cpu:
        torch.addmm(total, left.T, right, out_dtype=total.dtype, out=total)
        return
    left, right = left.float(), right.float()
    if onednn.computes(left):  # which cannot add in place
        for rows in _parts(len(total), max(1, SUMMED_ELEMENTS // total.shape[1])):
            total[rows] += onednn.linear(left[:, rows].T, right.T)
    else:
        total.addmm_(left.T, right)  # without a copy of the size of `total`


def _zeros_like(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=torch.float32)
