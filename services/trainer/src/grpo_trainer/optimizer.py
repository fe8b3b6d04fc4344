"""AdamW on fp32 masters of the policy's parameters.

A bf16 weight has 8 bits of mantissa: at a learning rate of 1e-6 almost every update rounds away.
Gradients are therefore gathered in fp32, the step is taken on fp32 copies, and only its result is
rounded into the served weights. The step itself touches no served weight, so serving goes on
meanwhile; `write_into_parameters` is the short moment that needs a pause.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from grpo_trainer.errors import NonFiniteGradient

MASTER = "master"


class MasterOptimizer:
    """Owns the masters, their gradients and the learning-rate schedule.

    Args:
        parameters: the policy's parameters; their gradients are taken over as they appear
        lr: peak learning rate, reached after `warmup_steps` steps of linear growth
        max_grad_norm: bound on the global L2 norm of the gradient
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        warmup_steps: int,
        weight_decay: float,
        max_grad_norm: float,
    ) -> None:
        self._parameters = list(parameters)
        self.masters = [p.detach().float().clone().requires_grad_() for p in self._parameters]
        self._adamw = torch.optim.AdamW(self.masters, lr=lr, weight_decay=weight_decay)
        self._lr = lr
        self._warmup_steps = warmup_steps
        self._max_grad_norm = max_grad_norm
        for parameter, master in zip(self._parameters, self.masters, strict=True):
            hook = _GradientTransfer(master)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def learning_rate(self, step: int) -> float:
        """Rate of the step with this index, counted from 0."""
        if step >= self._warmup_steps:
            return self._lr
        return self._lr * (step + 1) / self._warmup_steps

    def step(self, step: int) -> float:
        """Update the masters from the gathered gradients; returns the norm before clipping.

        Raises:
            NonFiniteGradient: nothing was updated.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.masters, self._max_grad_norm)
        if not bool(norm.isfinite()):
            raise NonFiniteGradient(
                f"step {step}: gradient norm is {float(norm)}; the weights of the step before are "
                "intact. Lower the learning rate, or look for extreme ratios in the last metrics"
            )
        for group in self._adamw.param_groups:
            group["lr"] = self.learning_rate(step)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return float(norm)

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """All that the next step depends on, as `kind/name`; not copied.

        Kinds: master, and AdamW's own (step, exp_avg, exp_avg_sq) once it has taken a step.

        Args:
            names: of the parameters, in their order
        """
        found: dict[str, Tensor] = {}
        for name, master in zip(names, self.masters, strict=True):
            kinds = {MASTER: master.detach(), **self._adamw.state.get(master, {})}
            found |= {f"{kind}/{name}": tensor for kind, tensor in kinds.items()}
        return found

    @torch.no_grad()
    def load_tensors(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` returned. The parameters follow with the next write."""
        own: dict[str, dict[str, Tensor]] = {name: {} for name in names}
        for path, tensor in tensors.items():
            kind, _, name = path.partition("/")
            own[name][kind] = tensor
        for name, master in zip(names, self.masters, strict=True):
            master.copy_(own[name].pop(MASTER))
            if own[name]:
                self._adamw.state[master] = {k: t.clone() for k, t in own[name].items()}

    @torch.no_grad()
    def write_into_parameters(self) -> None:
        """Round the masters into the policy's parameters, in place: their addresses stay."""
        torch._foreach_copy_(list[Tensor](self._parameters), self.masters)

    @torch.no_grad()
    def unwritten_parameters(self) -> int:
        """How many parameters do not hold their master's value; 0 right after a write."""
        pairs = zip(self._parameters, self.masters, strict=True)
        return sum(not torch.equal(p, master.to(p.dtype)) for p, master in pairs)


class _GradientTransfer:
    """Moves a finished gradient into the master's and frees it, one parameter at a time."""

    def __init__(self, master: Tensor) -> None:
        self._master = master

    def __call__(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.float()
        parameter.grad = None
        if self._master.grad is None:
            self._master.grad = gradient
        else:
            self._master.grad += gradient
