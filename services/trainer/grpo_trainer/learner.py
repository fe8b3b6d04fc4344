"""The learner: forward and backward passes over the micro-batches of one step, whose gradients add
up.

An adapter's dropout is on only in the forward pass whose gradient is used. The comparison with the
server, and every metric but the loss, use a second forward pass without dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial

import structlog
import torch
from torch import nn

from grpo_core.cpu import keep_freed_memory
from grpo_core.tree.objectives import Objective
from grpo_core.tree.trainer import TrainerSettings
from grpo_trainer.data.collate import Batch, MicroBatch
from grpo_trainer.errors import NonFiniteGradient, NonFiniteLoss, NonFiniteStep
from grpo_trainer.losses import (
    NO_SUMS,
    LossParts,
    LossSums,
    loss_sums,
    step_loss,
)
from grpo_trainer.model.adapter import adapter_dropouts, dropout_on, trained_parameters
from grpo_trainer.model.division import Division, division_of
from grpo_trainer.model.forward import (
    FastForward,
    ForwardPass,
    build_forward_pass,
    plain_forward,
)
from grpo_trainer.model.loading import broadcast_policy, device_to_load_on, warn_of_slow_type
from grpo_trainer.model.logprobs import TokenValues, values_of_all
from grpo_trainer.model.policy import CausalLM, device_of, train_only
from grpo_trainer.model.reference import Reference, build_reference
from grpo_trainer.optim.digests import BEGIN_DIGESTS, SAVED_DIGESTS, WeightDigests
from grpo_trainer.optim.master_optimizer import MasterOptimizer, build_optimizer
from grpo_trainer.optim.sharding import RankOptimizer
from grpo_trainer.ranks import ALONE, Orders, Ranks
from grpo_trainer.token_table import TokenTable

log = structlog.get_logger()

_SUMS = [column.name for column in fields(LossSums)]
_MAXIMA = [name for name in _SUMS if name.endswith("max")]


@dataclass(frozen=True)
class GradientStats:
    """Loss and metrics of a batch.

    Args:
        loss_parts: the policy's loss, the KL penalty and the entropy bonus; see `LossParts`
        tokens: the trained tokens with logprobs from before the update
        norm: L2 norm of the gradient before clipping; 0 without an optimizer
    """

    loss_parts: Sequence[float]
    sums: LossSums
    tokens: TokenTable
    norm: float

    @property
    def loss(self) -> float:
        return sum(self.loss_parts)


@dataclass(frozen=True)
class Meanwhile:
    """What the host does while a GPU computes the gradients of a step.

    Args:
        begun: called when a forward pass was launched, and its backward pass was not
        known: called with the trained tokens when the last backward pass was launched
    """

    begun: Callable[[], None] = lambda: None
    known: Callable[[TokenTable], object] = lambda _: None


NOTHING = Meanwhile()


def accumulate_gradients(
    policy: CausalLM,
    batch: Batch,
    objective: Objective,
    step: int,
    forward: ForwardPass = plain_forward,
    optimizer: MasterOptimizer | None = None,
    ranks: Ranks = ALONE,
    meanwhile: Meanwhile = NOTHING,
) -> GradientStats:
    """Run forward and backward over the micro-batches; their gradients add up to the batch's.

    Each rank computes its portion. Sums, never averages: the weights of the tokens are those of the
    whole batch, so the sum of the ranks' gradients is the gradient that one process computes.

    Args:
        policy: if it is divided, its passes add up the gradients themselves
        optimizer: collects the gradients, which are multiplied by its loss scale

    Raises:
        NonFiniteStep: the loss or the gradient norm is NaN or infinite, on all ranks alike.
    """
    micro_batches, dropouts = batch.micro_batches, adapter_dropouts(policy)
    portion = ranks.portion(micro_batches, micro_batches[0].without_weight())
    loss_scale = None if optimizer is None else optimizer.loss_scale
    adds_up = ranks.count > 1 and division_of(policy) is None
    for scale in [1.0] if loss_scale is None else loss_scale.attempts():
        found = Totals()
        with ranks.exchange("computing gradients"):
            for number, micro in enumerate(portion):
                where = f"step {step}, micro-batch {number}" if ranks.count == 1 else None
                begun = meanwhile.begun
                if optimizer is not None and adds_up and number + 1 == len(portion):
                    optimizer.gradients.begin_adding_up(ranks)
                found.add(
                    *backward(policy, micro, objective, forward, dropouts, scale, where, begun)
                )
                if optimizer is not None:
                    optimizer.gradients.gather()
            if optimizer is not None and adds_up:
                optimizer.gradients.add_up(ranks)
        found.add_up(ranks)
        if not math.isfinite(sum(found.loss_parts)):
            raise _non_finite(f"step {step}", sum(found.loss_parts), found.sums)
    seen = values_of_all(found.seen, micro_batches, ranks)
    known = [m.with_recomputed(s.logp) for m, s in zip(micro_batches, seen, strict=True)]
    tokens = TokenTable.of(known, seen)
    meanwhile.known(tokens)
    norm = 0.0 if optimizer is None else optimizer.gradient_norm(step)
    return GradientStats(found.loss_parts, found.sums, tokens, norm)


@dataclass(frozen=True)
class Learner:
    """A policy, and what computes and takes its steps. Every rank has one, with --fsdp a part of
    one.

    Args:
        reference: None without a KL penalty
        orders: of rank 0
    """

    settings: TrainerSettings
    ranks: Ranks
    policy: CausalLM
    forward: FastForward
    reference: Reference | None
    optimizer: MasterOptimizer
    orders: Orders = field(default_factory=partial(Orders, ALONE))

    @property
    def names(self) -> list[str]:
        """Of the trained parameters, in the order of the master weights."""
        return list(trained_parameters(self.policy))

    @cached_property
    def digests(self) -> WeightDigests:
        """Of the master weights."""
        return WeightDigests(self.optimizer.masters, self.orders, self.optimizer.parts)

    def with_reference(self, batch: Batch) -> Batch:
        """The batch with the reference model's logprobs, if there is one."""
        return batch if self.reference is None else self.reference.added(batch, self.ranks)

    def accumulate_once(
        self, batch: Batch, objective: Objective, step: int, meanwhile: Meanwhile = NOTHING
    ) -> GradientStats:
        """Run `accumulate_gradients`."""
        return accumulate_gradients(
            self.policy,
            batch,
            objective,
            step,
            self.forward,
            self.optimizer,
            self.ranks,
            meanwhile,
        )

    def accumulate(
        self, batch: Batch, objective: Objective, step: int, meanwhile: Meanwhile = NOTHING
    ) -> GradientStats:
        """Compute a batch's gradients, which the optimizer collects. A failed attempt is repeated
        once, because the machine may have caused it.

        Raises:
            NonFiniteStep: both attempts failed, on all ranks alike.
        """
        for is_repeated in (False, True):
            try:
                self.ranks.seed(self.settings.seed, step)
                return self.accumulate_once(batch, objective, step, meanwhile)
            except NonFiniteStep as error:
                self.optimizer.gradients.clear()
                if is_repeated:
                    raise
                if isinstance(error, NonFiniteGradient):
                    meanwhile = NOTHING  # it was called: the checks count each batch once
                log.warning("step.retried", step=step, reason=str(error))
        raise AssertionError

    def follow(self) -> None:
        """Do what rank 0 orders while it works alone."""
        self.orders.actions |= {
            BEGIN_DIGESTS: lambda _: self.digests.begin(),
            SAVED_DIGESTS: lambda _: self.digests.finish_saved(),
        }
        self.orders.follow()


def with_objective(learner: Learner, settings: TrainerSettings) -> Learner:
    """The same policy and optimizer with the objective of other settings. One rank alone.

    Raises: those of `build_reference`
    """
    forward = replace(learner.forward, differentiates_entropy=settings.entropy_coef > 0)
    reference = build_reference(learner.policy, forward, settings)
    return replace(learner, settings=settings, forward=forward, reference=reference)


def load_learner(policy: CausalLM | None, settings: TrainerSettings, ranks: Ranks) -> Learner:
    """Called on all ranks; the others take the policy of rank 0. Args: policy: None on ranks above
    0"""
    if policy is not None:
        # Dropout would make the trainer's logprobs differ from the server's at random.
        policy.eval()
    policy, settings = broadcast_policy(policy, settings, ranks)
    learner = build_learner(policy, settings, ranks)
    if device_of(policy).type == "cpu":
        keep_freed_memory(max(parameter.nbytes for parameter in policy.parameters()))
    if ranks.leads:
        warn_of_slow_type(policy)
    return learner


def build_learner(policy: CausalLM, settings: TrainerSettings, ranks: Ranks) -> Learner:
    """Called on all ranks, with equal policies. With --fsdp the policy is divided, and ranks above
    0 give one without content. Raises the errors of `Division`, `build_optimizer` and
    `build_reference`."""
    orders = Orders(ranks)
    if settings.trained_layers is not None:
        train_only(policy, settings.trained_layers)
    divides = settings.fsdp and ranks.count > 1
    if divides:
        Division(policy, device_to_load_on(settings.device), orders, "the policy")
    forward = build_forward_pass(policy, settings, differentiates_entropy=settings.entropy_coef > 0)
    reference = build_reference(policy, forward, settings, orders if divides else None)
    of_rank = partial(RankOptimizer, ranks, division_of(policy))
    kind = MasterOptimizer if ranks.count == 1 else of_rank
    optimizer = build_optimizer(policy, settings, kind, ranks.index if divides else 0)
    return Learner(settings, ranks, policy, forward, reference, optimizer, orders)


@dataclass
class Totals:
    """Loss and metrics of the micro-batches so far. `seen`: [B, T] of each of them, without
    gradient, in host memory."""

    loss_parts: Sequence[float] = (0.0,) * len(LossParts._fields)
    sums: LossSums = NO_SUMS
    seen: list[TokenValues] = field(default_factory=list)

    def add(self, loss_parts: Sequence[float], sums: LossSums, seen: TokenValues) -> None:
        self.loss_parts = [a + b for a, b in zip(self.loss_parts, loss_parts, strict=True)]
        self.sums += sums
        self.seen.append(seen)

    def add_up(self, ranks: Ranks) -> None:
        """Make loss and sums those of the whole batch."""
        if ranks.count == 1:
            return
        values = [getattr(self.sums, name) for name in _SUMS]
        flat = torch.tensor([*self.loss_parts, *values], dtype=torch.float64)
        largest = torch.tensor([getattr(self.sums, name) for name in _MAXIMA]).double()
        totals, parts = ranks.total(flat).tolist(), len(self.loss_parts)
        whole = dict(zip(_SUMS, totals[parts:], strict=True))
        maxima = dict(zip(_MAXIMA, ranks.maximum(largest).tolist(), strict=True))
        self.loss_parts, self.sums = totals[:parts], LossSums(**whole | maxima)


def backward(
    policy: CausalLM,
    micro: MicroBatch,
    objective: Objective,
    forward: ForwardPass,
    dropouts: Sequence[nn.Dropout],
    scale: float,
    where: str | None,
    begun: Callable[[], None],
) -> tuple[list[float], LossSums, TokenValues]:
    """Run forward and backward over a micro-batch; returns what `Totals.add` takes.

    Args:
        dropouts: the adapter's
        scale: multiplies the gradients
        where: names the micro-batch in an error. None: never raise, because the backward passes of
            several ranks wait for each other
        begun: see `Meanwhile`

    Raises:
        NonFiniteLoss: the loss is NaN or infinite.
    """
    on_device = micro.to(device_of(policy))
    with dropout_on(dropouts):
        trained = forward(policy, on_device)
    without_dropout = trained
    if dropouts:
        with torch.no_grad():
            without_dropout = forward(policy, on_device)
    on_device = on_device.with_recomputed(without_dropout.logp)
    parts = step_loss(trained, on_device, objective)
    loss = parts.policy + parts.kl + parts.entropy
    arrived = _sent_to_host(parts, without_dropout)
    begun()
    # Dropout is on again, because layers that are recomputed must repeat the forward pass.
    with dropout_on(dropouts):
        (scale * loss).backward()  # type: ignore[no-untyped-call]
    # The host computes the sums while the GPU runs the backward pass.
    read, values = arrived()
    sums = loss_sums(values, micro.with_recomputed(values.logp), objective)
    if where is not None and not math.isfinite(sum(read)):
        raise _non_finite(where, sum(read), sums)
    return read, sums, values


def _non_finite(where: str, loss: float, sums: LossSums) -> NonFiniteLoss:
    return NonFiniteLoss(
        f"{where}: the loss is {loss} (largest importance ratio {sums.ratio_max:.3g}, largest |log "
        f"importance ratio| {sums.diff_max:.3g}). The step changed no weight. Lower the learning "
        "rate, or inspect the batch's logprobs"
    )


def _sent_to_host(
    parts: LossParts, values: TokenValues
) -> Callable[[], tuple[list[float], TokenValues]]:
    """Begin to copy all to host memory in one transfer. The result waits for it, and returns the
    scalars and [B, T] each."""
    scalars = torch.stack(parts).detach()
    flat = torch.cat([scalars, *(value.detach().flatten() for value in values)])
    shape = (len(values), *values.logp.shape)
    copy = flat.to("cpu", non_blocking=True)
    copied = torch.cuda.Event() if flat.is_cuda else None  # type: ignore[no-untyped-call]
    if copied is not None:
        copied.record()

    def arrived() -> tuple[list[float], TokenValues]:
        if copied is not None:
            copied.synchronize()
        return copy[: len(parts)].tolist(), TokenValues(*copy[len(parts) :].view(shape))

    return arrived
