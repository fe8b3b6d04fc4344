"""What all ranks compute together: each rank its micro-batches, then the sums over all ranks.

Sums, never averages: the weights of the tokens are those of the whole batch, so the sum of the
ranks' gradients is the gradient that one process computes.

Legend: M micro-batches of the batch, B sequences and T positions of one of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from grpo_trainer.algo.accumulate import Computed, GradientStats, computed
from grpo_trainer.algo.logprob_comparison import TokenTable
from grpo_trainer.algo.loss import LossParts, LossSums
from grpo_trainer.data.collate import MicroBatch
from grpo_trainer.errors import NonFiniteLoss
from grpo_trainer.model.forward import ForwardPass
from grpo_trainer.model.logprobs import TokenValues
from grpo_trainer.model.policy import CausalLM, device_of
from grpo_trainer.model.reference import Reference
from grpo_trainer.objective.recipes import Objective
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.ranks.group import Ranks

_SUM_NAMES = [field.name for field in fields(LossSums)]
_MAXIMA = [name for name in _SUM_NAMES if name.endswith("max")]


@dataclass(frozen=True)
class Joint:
    """The objects with which a rank computes its share.

    Args:
        policy: the whole policy, or this rank's part of it
        is_sharded: its passes add up the gradients themselves (FSDP2)
        reference: None without a reference model
    """

    ranks: Ranks
    policy: CausalLM
    forward: ForwardPass
    is_sharded: bool
    optimizer: MasterOptimizer
    reference: Reference | None

    def gradients(
        self, micro_batches: Sequence[MicroBatch], objective: Objective, step: int
    ) -> GradientStats:
        """Collect the batch's gradients: the whole ones, or this rank's parts of them.

        Args:
            micro_batches: the whole batch

        Raises:
            NonFiniteLoss: on all ranks alike; no gradient is kept.
        """
        gradients = self.optimizer.gradients
        gradients.clear()
        share, numbers = self._share(micro_batches)
        with self.ranks.exchange("computing gradients"):
            found = computed(self.policy, share, objective, step, self.forward, stops=False)
        parts, sums = self._whole_sums(found)
        if not math.isfinite(sum(parts)):
            gradients.clear()
            raise NonFiniteLoss(
                f"step {step}: the loss is {sum(parts)} (largest importance ratio "
                f"{sums.ratio_max:.3g}, largest |log importance ratio| {sums.diff_max:.3g}). The "
                "step changed no weight. Lower the learning rate, or inspect the batch's logprobs"
            )
        if not self.is_sharded:
            self._add_up_gradients()
        seen = self._whole_values(micro_batches, numbers, found.seen)
        known = [m.with_recomputed(s.logp) for m, s in zip(micro_batches, seen, strict=True)]
        return GradientStats(parts, sums, TokenTable.of(known, seen))

    @torch.no_grad()
    def reference_logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """[B, T] for each micro-batch of the whole batch, in host memory."""
        assert self.reference is not None
        model, forward = self.reference.model, self.reference.forward
        share, numbers = self._share(micro_batches)
        with self.reference.active():
            found = [forward(model, micro.to(device_of(model))) for micro in share]
        seen = [TokenValues(*(value.cpu() for value in values)) for values in found]
        return [s.logp for s in self._whole_values(micro_batches, numbers, seen)]

    def _share(self, micro_batches: Sequence[MicroBatch]) -> tuple[list[MicroBatch], list[int]]:
        """This rank's micro-batches, as many as every rank has, and the numbers of those that are
        no filling."""
        count, total = self.ranks.count, len(micro_batches)
        numbers = list(range(self.ranks.index, total, count))
        share = [micro_batches[i] for i in numbers]
        filling = [_without_weight(micro_batches[0])] * (-(-total // count) - len(share))
        return [*share, *filling], numbers

    def _whole_sums(self, found: Computed) -> tuple[list[float], LossSums]:
        values = [getattr(found.sums, name) for name in _SUM_NAMES]
        flat = torch.tensor([*found.loss_parts, *values], dtype=torch.float64)
        largest = torch.tensor([getattr(found.sums, name) for name in _MAXIMA]).double()
        totals = self.ranks.total(flat).tolist()
        parts = len(LossParts._fields)
        whole = dict(zip(_SUM_NAMES, totals[parts:], strict=True))
        maxima = dict(zip(_MAXIMA, self.ranks.maximum(largest).tolist(), strict=True))
        return totals[:parts], LossSums(**whole | maxima)

    @torch.no_grad()
    def _add_up_gradients(self) -> None:
        """Add up the gradients in float32. A parameter may have none on some ranks."""
        held = self.optimizer.gradients.tensors
        has = self.ranks.total(torch.tensor([int(gradient is not None) for gradient in held]))
        for index, master in enumerate(self.optimizer.masters):
            if not has[index]:
                continue
            gradient = held[index]
            wide = torch.zeros_like(master, dtype=torch.float32)
            if gradient is not None:
                wide.copy_(gradient)
            held[index] = None  # frees its memory
            held[index] = self.ranks.total(wide)

    def _whole_values(
        self,
        micro_batches: Sequence[MicroBatch],
        numbers: Sequence[int],
        seen: Sequence[TokenValues],
    ) -> list[TokenValues]:
        """The values of all micro-batches. Args: seen: those of the micro-batches `numbers`, then
        those of the filling"""
        width = len(TokenValues._fields)
        sizes = [width * micro.inputs.numel() for micro in micro_batches]
        flat = torch.zeros(sum(sizes))
        places = torch.split(flat, sizes)
        for number, values in zip(numbers, seen, strict=False):
            places[number].copy_(torch.cat([value.flatten() for value in values]))
        self.ranks.total(flat)  # each place is 0 on all ranks but one
        pairs = zip(places, micro_batches, strict=True)
        return [TokenValues(*part.view(width, *micro.inputs.shape)) for part, micro in pairs]


def _without_weight(micro: MicroBatch) -> MicroBatch:
    """A single token that adds 0 to every sum."""
    return replace(
        micro,
        inputs=micro.inputs[:1, :1],
        targets=micro.targets[:1, :1],
        behaviour_logp=micro.behaviour_logp[:1, :1],
        token_weight=torch.zeros(1, 1),
        advantages=torch.zeros(1, 1),
        temperature=micro.temperature[:1],
        lengths=(1,),
        shared=(0,),
        is_logged=(True,),
        reference_logp=None if micro.reference_logp is None else torch.zeros(1, 1),
    )
