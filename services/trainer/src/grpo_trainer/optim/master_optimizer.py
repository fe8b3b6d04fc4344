"""AdamW on masters of the policy's parameters.

A bf16 weight has 8 bits of mantissa: at a learning rate of 1e-6 almost every update rounds away.
The step is therefore taken on masters, fp32 copies or bf16 ones that are rounded stochastically
(`masters`), and only its result goes into the served weights. The step itself touches no served
weight, so serving goes on meanwhile; `write_into_parameters` is the short moment that needs a
pause.

To keep it short, a step leaves its result in the served data type as well where the masters are in
another one (the staging copy): each part takes the place of a gradient that was used up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from grpo_trainer.errors import NonFiniteGradient
from grpo_trainer.optim.adamw import AdamW32, State, StepOptions
from grpo_trainer.optim.master_gradients import GatheredGradients, LossScale
from grpo_trainer.optim.masters import Masters

MASTER = "master"


class MasterOptimizer:
    """Owns the masters, their gradients and the learning-rate schedule.

    Args:
        parameters: the policy's parameters; their gradients are taken over as they appear
        lr: peak learning rate, reached after `warmup_steps` steps of linear growth
        max_grad_norm: bound on the global L2 norm of the gradient
        update: what a step does to a master (default: AdamW in fp32)
        scales_loss: gradients are computed in float16 and come multiplied by `loss_scale`
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        warmup_steps: int,
        weight_decay: float,
        max_grad_norm: float,
        update: Masters | None = None,
        scales_loss: bool = False,
    ) -> None:
        self._parameters = list(parameters)
        self._update = update or Masters(AdamW32())
        self.masters = [_contiguous_copy(p, self._update.dtype) for p in self._parameters]
        self.gradients = GatheredGradients(self._parameters)
        self.loss_scale = LossScale(self.gradients) if scales_loss else None
        self._states: list[State] = [{} for _ in self.masters]
        self._staged: list[Tensor | None] = [None for _ in self.masters]
        self._lr = lr
        self._warmup_steps = warmup_steps
        self._weight_decay = weight_decay
        self._max_grad_norm = max_grad_norm

    def learning_rate(self, step: int) -> float:
        """Rate of the step with this index, counted from 0."""
        if step >= self._warmup_steps:
            return self._lr
        return self._lr * (step + 1) / self._warmup_steps

    @torch.no_grad()
    def step(self, step: int) -> float:
        """Update the masters from the gathered gradients; returns the norm before clipping.

        Raises:
            NonFiniteGradient: nothing was updated.
        """
        norm, clip_factor = self._norm_and_clip_factor()
        if not math.isfinite(norm):
            raise NonFiniteGradient(
                f"step {step}: gradient norm is {norm}; the weights of the previous step are "
                "intact. Lower the learning rate, or look for extreme ratios in the last metrics"
            )
        lr, scale = self.learning_rate(step), clip_factor / self._scale
        options = StepOptions(lr, self._weight_decay, scale)
        self._update.begin_step(step)
        for index in range(len(self.masters)):
            self._step_one(index, options)
        if self.loss_scale is not None:
            self.loss_scale.step_taken()
        return norm

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """All that the next step depends on, as `kind/name`; not copied.

        Kinds: master, and those of the update rule once it has taken a step (AdamW's: step,
        exp_avg, exp_avg_sq).

        Args:
            names: of the parameters, in their order
        """
        found: dict[str, Tensor] = {}
        for name, master, state in zip(names, self.masters, self._states, strict=True):
            kinds = {MASTER: master, **state}
            found |= {f"{kind}/{name}": tensor for kind, tensor in kinds.items()}
        return found

    def state_bytes(self) -> int:
        """Of what `tensors` returns once every parameter has taken a step."""
        states = [self._update.initial_state(master.to("meta")) for master in self.masters]
        kept = [*self.masters, *(tensor for state in states for tensor in state.values())]
        return sum(tensor.nbytes for tensor in kept)

    @torch.no_grad()
    def load_tensors(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` returned. The parameters follow with the next write."""
        own: dict[str, State] = {name: {} for name in names}
        for path, tensor in tensors.items():
            kind, _, name = path.partition("/")
            own[name][kind] = tensor
        for index, (name, master) in enumerate(zip(names, self.masters, strict=True)):
            saved = own[name]
            master.copy_(saved.pop(MASTER))
            self._states[index] = self._update.restored(saved, master) if saved else {}
            self._staged[index] = None

    @torch.no_grad()
    def write_into_parameters(self) -> None:
        """Round the masters into the policy's parameters, in place: their addresses stay.

        Copies what the step has staged, where it has, and lets go of it. A repeated write rounds
        once more, to the same bytes: to the nearest in either case.
        """
        pairs = zip(self._staged, self.masters, strict=True)
        newest = [master if staged is None else staged for staged, master in pairs]
        torch._foreach_copy_(list[Tensor](self._parameters), newest)
        self._staged = [None for _ in self.masters]

    @torch.no_grad()
    def unwritten_parameters(self) -> int:
        """How many parameters do not hold their master's value; 0 right after a write."""
        pairs = zip(self._parameters, self.masters, strict=True)
        return sum(not torch.equal(p, master.to(p.dtype)) for p, master in pairs)

    @property
    def _scale(self) -> float:
        """What the gathered gradients are multiplied by; a power of two, so that to divide by it
        rounds nothing."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def _norm_and_clip_factor(self) -> tuple[float, float]:
        """In fp32, as `torch.nn.utils.clip_grad_norm_` has them; waits for the device once."""
        norm = self.gradients.norm() / self._scale
        clip_factor = torch.clamp(self._max_grad_norm / (norm + 1e-6), max=1.0)
        both: list[float] = torch.stack((norm, clip_factor)).tolist()
        return both[0], both[1]

    def _step_one(self, index: int, options: StepOptions) -> None:
        gradient, master = self.gradients.pop(index), self.masters[index]
        if gradient is None:
            return
        served = self._parameters[index].dtype
        state = self._states[index] or self._update.initial_state(master)
        staged = self._update.step(master, gradient, state, options, served)
        del gradient  # its memory is what the staging copy goes into
        self._states[index] = state
        # of one type: the master itself, and no copy
        self._staged[index] = master.to(served) if staged is None else staged


def _contiguous_copy(parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    return parameter.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
