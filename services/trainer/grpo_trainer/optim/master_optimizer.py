"""Updates master weights, then writes them into the policy's parameters.

A bf16 weight has 8 bits of mantissa: at a learning rate of 1e-6 almost every update would round to
nothing. So the step updates master weights: fp32 copies, or bf16 copies with stochastic rounding
(`master_update`). The step does not touch the served weights, so the server keeps sampling. Only
`write_into_parameters` needs a pause.

To shorten the pause, a step also rounds its result to the served data type, if that differs, into
the staging copy, which takes the memory of the gradients that were used.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from grpo_core.tree.trainer import TrainerSettings
from grpo_trainer.errors import NonFiniteGradient
from grpo_trainer.model.adapter import trained_parameters
from grpo_trainer.model.policy import CausalLM, middle
from grpo_trainer.optim.buckets import MASTER, Bucket, buckets_of, in_order, own_part
from grpo_trainer.optim.gradients import Gradients
from grpo_trainer.optim.loss_scale import LossScale
from grpo_trainer.optim.master_update import MasterUpdate, build_update
from grpo_trainer.optim.rules import ADAM, STEP, Adam, AdamW32, State, StepOptions
from grpo_trainer.optim.schedule import LearningRate, Schedule

WATCHED_TENSORS, WATCHED_WEIGHTS = 8, 256
_WRITTEN_AT_ONCE = 16
FLOAT32_EPS = torch.finfo(torch.float32).eps


class MasterOptimizer:
    """Owns the master weights, their gradients and the learning-rate schedule.

    Args:
        parameters: the policy's parameters. If they are divided among ranks, this rank's parts are
            updated
        learning_rate: of each step
        weight_decay: of matrices and embeddings. Norms and biases have none, as in Hugging Face's
            Trainer: their size does not add to the model's capacity
        max_grad_norm: bound on the global L2 norm of the gradient
        update: updates master weights (default: AdamW in fp32)
        adam: constants of the Adam rules
        total: see `Gradients`
        scales_loss: gradients are computed in float16 and multiplied by `loss_scale`
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        learning_rate: LearningRate,
        weight_decay: float,
        max_grad_norm: float,
        update: MasterUpdate | None = None,
        scales_loss: bool = False,
        adam: Adam = ADAM,
        total: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        whole = list(parameters)
        self._shapes = [p.shape for p in whole]
        self.update = update or MasterUpdate(AdamW32())
        self.buckets = buckets_of(whole, weight_decay, self.update)
        self._parameters = in_order(self.buckets, lambda bucket: bucket.parameters)
        self.masters = in_order(self.buckets, lambda bucket: bucket.masters)
        self.gradients = Gradients(self.buckets, total)
        self.loss_scale = LossScale(self.gradients) if scales_loss else None
        self._watch: _UpdateWatch | None = None
        self.learning_rate = learning_rate
        self._adam = adam
        self._max_grad_norm = max_grad_norm

    @property
    def parts(self) -> int:
        """Number of ranks among which each master weight tensor is divided."""
        return 1

    def gradient_norm(self, step: int) -> float:
        """L2 norm of the collected gradients before clipping. Waits for the device.

        Raises:
            NonFiniteGradient: no step can be taken.
        """
        self.gradients.gather()
        norm = self.gradients.norm() / self._scale
        if not math.isfinite(norm):
            raise NonFiniteGradient(
                f"step {step}: the gradient norm is {norm}; the step changed no weight. Lower the "
                "learning rate, or look for extreme importance ratios in the metrics of the "
                "previous steps"
            )
        return norm

    @torch.no_grad()
    def step(self, step: int) -> float:
        """Update the master weights from the collected gradients; returns the gradient norm before
        clipping.

        Raises:
            NonFiniteGradient: nothing was updated.
        """
        norm = self.gradient_norm(step)
        # In fp32, as in `torch.nn.utils.clip_grad_norm_`.
        clip_factor = torch.clamp(self._max_grad_norm / (torch.tensor(norm) + 1e-6), max=1.0)
        lr, scale = self.learning_rate(step), float(clip_factor) / self._scale
        self.update.begin_step(step)
        # Stochastic rounding leaves most weights as they were: the mean is right.
        watches = lr > 0 and self.update.rounding is None
        self._watch = _UpdateWatch(self.masters, self.gradients.tensors, lr) if watches else None
        for bucket in self.buckets:
            bucket.step(StepOptions(lr, bucket.weight_decay, scale, self._adam))
        if self.loss_scale is not None:
            self.loss_scale.step_taken()
        return norm

    def unchanged_fraction(self) -> float:
        """Share of the weights with a gradient that the last step left as they were, over a few
        weights; 0 if the step had to change none of them. Read it before the next step."""
        return 0.0 if self._watch is None else self._watch.unchanged_fraction()

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """All tensors that the next step depends on, as `kind/name`; not copied. Of a divided
        parameter DTensors, which hold this rank's rows.

        Kinds: master, and those of the update rule once it has taken a step (AdamW's: step,
        exp_avg, exp_avg_sq).

        Args:
            names: of the parameters, in their order
        """
        found: dict[str, Tensor] = {}
        for name, kinds in zip(names, in_order(self.buckets, Bucket.tensors), strict=True):
            found |= {f"{kind}/{name}": tensor for kind, tensor in kinds.items()}
        return found

    def state_bytes(self) -> int:
        """Size of what `tensors` returns once every parameter has taken a step."""
        whole = [torch.empty(s, dtype=self.update.dtype, device="meta") for s in self._shapes]
        return sum(t.nbytes for master in whole for t in self._kinds(master).values())

    def _kinds(self, master: Tensor) -> State:
        """The tensors of one parameter after a step, by kind. Args: master: whole"""
        rule = self.update.rule
        state = rule.initial_state(master, rule.kind_of(master))
        return {MASTER: master, STEP: torch.zeros(()), **state}

    def place(self, _path: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A new tensor to read one of `tensors` to. Args: shape: of the whole"""
        return torch.empty(shape, dtype=dtype)

    @torch.no_grad()
    def load_tensors(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        """Load what `tensors` returned, one parameter at a time. The next write updates the
        policy's parameters."""
        kinds = defaultdict[str, list[str]](list)
        for path in tensors:
            kind, _, name = path.partition("/")
            kinds[name].append(kind)
        places = {
            index: (bucket, position)
            for bucket in self.buckets
            for position, index in enumerate(bucket.indices)
        }
        for index, name in enumerate(names):
            saved = {kind: own_part(tensors[f"{kind}/{name}"]) for kind in kinds[name]}
            bucket, position = places[index]
            bucket.load(position, self._fitted(saved, self._shapes[index]))

    def _fitted(self, saved: State, shape: torch.Size) -> State:
        return self.update.rule.fitted(saved, shape, 0, 1)

    @torch.no_grad()
    def write_into_parameters(self, may_write: Callable[[], None] = lambda: None) -> None:
        """Round the master weights into the policy's parameters, in place: their addresses stay.

        Writes the staging copy if there is one, then frees it. A repeated write rounds the master
        weights again, with the same result: both round to the nearest.

        Args: may_write: called before every few tensors; what it raises ends the write
        """
        newest = in_order(self.buckets, Bucket.newest)
        for start in range(0, len(newest), _WRITTEN_AT_ONCE):
            part = slice(start, start + _WRITTEN_AT_ONCE)
            may_write()
            torch._foreach_copy_(self._parameters[part], newest[part])
        for bucket in self.buckets:
            bucket.staged = None

    @torch.no_grad()
    def unwritten_parameters(self) -> int:
        """Number of parameters that differ from their master weights; 0 right after a write."""
        pairs = zip(self._parameters, self.masters, strict=True)
        return sum(not torch.equal(p, master.to(p.dtype)) for p, master in pairs)

    @property
    def _scale(self) -> float:
        """Factor of the collected gradients. It is a power of two, so dividing by it is exact."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value


def build_optimizer(
    policy: CausalLM,
    settings: TrainerSettings,
    kind: Callable[..., MasterOptimizer] = MasterOptimizer,
    part: int = 0,
) -> MasterOptimizer:
    """Raises the errors of `build_update`. Args: kind: creates the object; part: see
    `build_update`"""
    parameters = list(trained_parameters(policy).values())
    return kind(
        parameters,
        learning_rate=Schedule.of(settings, settings.steps),
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        update=build_update(settings, parameters, part),
        scales_loss=any(p.dtype == torch.float16 for p in parameters),
        adam=Adam(settings.adam_beta1, settings.adam_beta2, settings.adam_eps),
    )


class _UpdateWatch:
    """Remembers a few weights of some matrices before an update. Only those are counted that a
    tenth of the learning rate would change in float32."""

    def __init__(
        self, masters: Sequence[Tensor], gradients: Sequence[Tensor | None], lr: float
    ) -> None:
        pairs = zip(masters, gradients, strict=True)
        trained = [(m, g) for m, g in pairs if g is not None and m.ndim > 1]
        some = trained[:: max(1, -(-len(trained) // WATCHED_TENSORS))]
        self._weights = [middle(master, WATCHED_WEIGHTS) for master, _ in some]
        if not some:
            return
        self._before = torch.cat(self._weights)
        # A gradient's memory may hold the staging copy after the update.
        gradients_of_some = torch.cat([middle(gradient, WATCHED_WEIGHTS) for _, gradient in some])
        self._moves = (gradients_of_some != 0) & (FLOAT32_EPS * self._before.abs() < 0.1 * lr)

    def unchanged_fraction(self) -> float:
        if not self._weights:
            return 0.0
        is_equal = torch.cat(self._weights) == self._before
        pair = [(is_equal & self._moves).sum(), self._moves.sum()]
        counts: list[int] = torch.stack(pair).tolist()
        return counts[0] / max(1, counts[1])
