"""Computes logprobs of given tokens, and entropies, from hidden states, without storing all logits
at once.

With a vocabulary of 150,000 tokens the logits take 600 kB per position in float32, and the plain
way holds several copies of them for the backward pass. Here they exist for some rows at a time:
once for the logprobs, and again for the gradient. Values equal those of the plain way.

Legend: K rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
COMPILED_BYTES = 2**30
"""Bytes of logits that exist at a time if the arithmetic is compiled for a GPU and thus makes no
copies of them. Each chunk reads and writes the gradient of all weights once more."""
CHUNK_LOGITS_ON_CPU = 2**24
"""64 MiB. More logits at a time are hardly faster, and fewer are slower."""
SUMMED_ELEMENTS = 2**23
"""Elements of the head's gradient that oneDNN computes at a time: 32 MiB."""

_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_DIVISORS = ("logits_scaling",)
"""Options of a model's configuration by which transformers limits, multiplies or divides its
logits."""
_MULTIPLIES = ("hyperclovax",)
"""Families that multiply by a divisor of other families."""


@dataclass(frozen=True)
class LogitChange:
    """A model multiplies the output of its head by `scale`. Then it limits it to ±`cap`."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, model: CausalLM) -> LogitChange:
        config = model.config.get_text_config()
        divides = config.model_type not in _MULTIPLIES
        scale = math.prod(_given(config, _FACTORS).values())
        for divisor in _given(config, _DIVISORS).values():
            scale = scale / divisor if divides else scale * divisor
        return cls(scale, *_given(config, _CAPS).values())

    def __call__(self, output: Tensor) -> Tensor:
        scaled = output * self.scale
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)


UNCHANGED = LogitChange()


def _given(config: Any, names: tuple[str, ...]) -> dict[str, Any]:
    values = {name: getattr(config, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def obstacles(model: CausalLM) -> list[str]:
    """Reasons why the fused head does not fit the model, as far as its configuration shows them.

    Args: model: the transformers model, without an adapter's wrapper.
    """
    config = model.config.get_text_config()
    found = [
        f"the model changes its logits by {name} = {value}"
        for name, value in _given(config, _CAPS + _FACTORS + _DIVISORS).items()
        if not isinstance(value, int | float)
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
    """The computations on the logits of some rows: [K, V] in the model's type. `gradient` replaces
    them by their gradient, and `logprobs` may overwrite them if they are in float32."""

    logprobs: Callable[..., tuple[Tensor, Tensor, Tensor]]
    gradient: Callable[..., Tensor]
    is_compiled: bool = False

    @classmethod
    def compiled(cls) -> HeadArithmetic:
        """Each as one kernel, instead of several that exchange float32 copies: `logprobs` reads the
        logits twice, and `gradient` reads and writes them once."""
        return cls(_compiled(_logprobs), _compiled(_logits_gradient), is_compiled=True)

    def chunk_logits(self, logits: torch.dtype, device: torch.device) -> int:
        """Number of logits that exist at a time."""
        if device.type == "cpu":
            return CHUNK_LOGITS_ON_CPU
        return COMPILED_BYTES // logits.itemsize if self.is_compiled else CHUNK_LOGITS


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """For any number of rows."""
    compiled = torch.compile(function, dynamic=True)

    def call(logits: Tensor, *others: Tensor | None) -> Any:
        # Only a fixed size tells the compiler that each row begins at a multiple of 16 bytes.
        torch._dynamo.mark_static(logits, 1)
        # Views that begin elsewhere than their storage would be compiled once more.
        return compiled(logits, *(None if each is None else each.clone() for each in others))

    return call


def _logprobs(
    logits: Tensor, targets: Tensor, temperature: Tensor, cap: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """[K] logprobs of the targets, [K] entropies of the distributions, and [K] logsumexp of the
    scaled logits; float32."""
    scaled = _scaled(_float32(logits), temperature, cap)  # [K, V]
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
    cap: Tensor | None,
    logsumexp: Tensor,
    entropy: Tensor,
    gradient: Tensor,
    of_entropy: Tensor | None,
) -> Tensor:
    """Replace [K, V] logits by their gradient. Args: gradient, of_entropy: [K], of the logprobs and
    the entropies"""
    scaled = _scaled(_float32(logits), temperature, cap)
    slope = None if cap is None else 1 - (scaled * (temperature.unsqueeze(-1) / cap)).square_()
    logps, factor = scaled.sub_(logsumexp.unsqueeze(-1)), gradient.unsqueeze(-1)
    if of_entropy is None:
        found, one = logps.exp_(), torch.full_like(gradient, -1)
    else:
        # dH/dx = -p (log p + H) and dlogp/dx = onehot - p
        distribution = logps.exp()
        found = logps.add_(entropy.unsqueeze(-1)).mul_(of_entropy.unsqueeze(-1)).add_(factor)
        found, one, factor = found.mul_(distribution), -gradient, torch.ones_like(factor)
    # In float32, because bfloat16 would round the gradient of a nearly certain target to 0.
    found = _add_to_targets(found, targets, one).mul_(-factor / temperature.unsqueeze(-1))
    return logits.copy_(found if slope is None else found.mul_(slope))


def _float32(logits: Tensor) -> Tensor:
    """For changes in place. Compiled code has no use for the storage, and would write to it."""
    return logits.to(torch.float32, copy=torch.compiler.is_compiling())


def _scaled(logits: Tensor, temperature: Tensor, cap: Tensor | None) -> Tensor:
    """[K, V] logits, changed in place."""
    if cap is not None:
        logits.div_(cap).tanh_().mul_(cap)
    return logits.div_(temperature.unsqueeze(-1))


def _add_to_targets(values: Tensor, targets: Tensor, one: Tensor) -> Tensor:
    """[K, V] values, of which each row's target is increased: [K], [K]."""
    index = targets.unsqueeze(-1)
    if torch.compiler.is_compiling():  # to which the other way is a kernel of its own
        is_target = torch.arange(values.shape[-1], device=values.device) == index
        return torch.where(is_target, values + one.unsqueeze(-1), values)
    return values.scatter_add_(-1, index, one.unsqueeze(-1))


EAGER = HeadArithmetic(_logprobs, _logits_gradient)


def linear_logprobs(
    hidden: Tensor,
    head: nn.Linear,
    targets: Tensor,
    temperature: Tensor,
    arithmetic: HeadArithmetic = EAGER,
    change: LogitChange = UNCHANGED,
    chunk_logits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Logprob of each target, and entropy of each distribution, at its temperature: [K] float32
    each.

    Args:
        hidden: [K, H] in the head's type
        targets: [K] int64
        temperature: [K] float32
        change: of the head's output
        chunk_logits: how many logits may exist at a time, but at least those of one row
    """
    if chunk_logits is None:
        chunk_logits = arithmetic.chunk_logits(hidden.dtype, hidden.device)
    rows = max(1, chunk_logits // head.out_features)
    # cap tanh(scale x / cap) / temperature, with all three divided by the scale
    temperature = temperature / change.scale
    cap = None if change.cap is None else temperature.new_full((), change.cap / change.scale)
    found: tuple[Tensor, Tensor] = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, targets, temperature, cap, arithmetic, rows
    )
    return found


class _LinearLogprobs(torch.autograd.Function):
    """Stores its inputs and two numbers per row; computes the logits again for the gradient, except
    those of the first rows if the forward pass did not overwrite them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
        cap: Tensor | None,
        arithmetic: HeadArithmetic,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        logp = torch.empty(len(hidden), device=hidden.device)
        entropy, logsumexp = torch.empty_like(logp), torch.empty_like(logp)
        logits = None
        for part in reversed(_parts(len(hidden), rows)):
            logits = None  # free the previous ones before the next exist
            logits = onednn.linear(hidden[part], weight, bias)
            logp[part], entropy[part], logsumexp[part] = arithmetic.logprobs(
                logits, targets[part], temperature[part], cap
            )
        rest = (targets, temperature, cap, logsumexp, entropy)
        ctx.save_for_backward(hidden, weight, bias, *rest)
        ctx.arithmetic, ctx.rows = arithmetic, rows
        # In float32, eager code overwrites them, and torch.compile may fall back to it.
        keeps = arithmetic.is_compiled and hidden.dtype != torch.float32
        ctx.logits = logits if keeps else None
        ctx.set_materialize_grads(False)  # None: the loss does not depend on it
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_logp: Tensor | None, of_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, cap, logsumexp, entropy = ctx.saved_tensors
        gradient = torch.zeros_like(logsumexp) if of_logp is None else of_logp
        of_hidden = torch.empty_like(hidden)
        # Summed in float32, because each of the many parts would be rounded.
        of_weight = _zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = _zeros_like(bias) if ctx.needs_input_grad[2] else None
        for part in _parts(len(hidden), ctx.rows):
            logits, ctx.logits = ctx.logits, None
            if logits is None:
                logits = onednn.linear(hidden[part], weight, bias)
            of_logits = ctx.arithmetic.gradient(
                logits,
                targets[part],
                temperature[part],
                cap,
                logsumexp[part],
                entropy[part],
                gradient[part],
                None if of_entropy is None else of_entropy[part],
            )
            of_hidden[part] = onednn.linear(of_logits, weight.T)
            if of_weight is not None:
                _add_product(of_weight, of_logits, hidden[part])
            if of_bias is not None:
                of_bias += of_logits.sum(0, dtype=torch.float32)
            del logits, of_logits  # before the next ones exist
        return (
            of_hidden,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(bias.dtype),
            *(None,) * 5,
        )


def _parts(length: int, rows: int) -> list[slice]:
    return [slice(start, start + rows) for start in range(0, length, rows)]


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
