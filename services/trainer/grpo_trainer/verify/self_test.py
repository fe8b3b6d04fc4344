"""Takes a training step without an update before the first real one, and checks its parts.

The batch is small and made here, so that the right results are known: behaviour logprobs are the
policy's own, and no advantage is 0. Everything else is the run's: model, objective, micro-batches
and gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import structlog
import torch
from torch import Tensor

from grpo_core.wire.fields import MASKED, PROMPT_LOGPROB
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.algo.accumulate import Accumulate, GradientStats
from grpo_trainer.algo.loss import step_loss
from grpo_trainer.config.trainer import TrainerSettings
from grpo_trainer.data.collate import Batch, MicroBatch, collate, with_penalties
from grpo_trainer.data.completion_weights import with_completion_weights
from grpo_trainer.data.group_checks import GroupLimits, UsableGroup, usable_group
from grpo_trainer.errors import SelfTestFailed
from grpo_trainer.model.adapter import adapter_dropouts
from grpo_trainer.model.forward import FastForward
from grpo_trainer.model.logprobs import TokenValues, logprobs_of, probe_tokens, tolerance_of
from grpo_trainer.model.policy import CausalLM, device_of, vocabulary_of
from grpo_trainer.model.reference import Reference
from grpo_trainer.objective.recipes import Objective
from grpo_trainer.optim.gradients import LossScale
from grpo_trainer.optim.master_optimizer import MasterOptimizer

log = structlog.get_logger()

PROMPT_TOKENS = 6
COMPLETION_TOKENS = (2, 3, 5, 4)
SCORES = (1.0, 0.0, 0.25, 0.75)
LONGEST = PROMPT_TOKENS + max(COMPLETION_TOKENS)
GRADIENT_TOLERANCE = 0.1
"""Relative difference of two ways to compute one gradient. In bfloat16 rounding reaches a few per
cent. Without one of the eight sequences, the gradient changes by about a third."""
SAMPLED_WEIGHTS = 1024
"""Gradients compared per tensor, about: a second copy of all would double their memory."""


@dataclass(frozen=True)
class SelfTest:
    """The objects of the run that the test uses."""

    policy: CausalLM
    forward: FastForward
    reference: Reference | None
    optimizer: MasterOptimizer
    settings: TrainerSettings
    accumulate: Accumulate

    def require(self) -> None:
        """Raises:
        SelfTestFailed: lists every part that gives a wrong result.
        """
        if self.settings.seq_len < LONGEST:
            log.info("self_test.skipped", reason=f"--seq-len is below {LONGEST} tokens")
            return
        problems = self._problems()
        if problems:
            raise SelfTestFailed(
                "Before the first step, the trainer computed a step without an update, and "
                f"{len(problems)} of its results are wrong:\n"
                + "\n".join(f"  - {problem}" for problem in problems)
                + "\nNo weight was changed. If the trainer's code was changed, undo that change; "
                "otherwise report this message"
            )
        log.info("self_test.passed")

    def _problems(self) -> list[str]:
        objective, groups = self.settings.resolved_objective, self._groups()
        batch = self._batch(groups, objective, tokens=len(groups) * len(SCORES) * LONGEST)
        with _unchanged(self.optimizer.loss_scale, device_of(self.policy)):
            return [
                *_of_advantages(batch, groups, objective),
                *_of_loss(batch.micro_batches[0], objective),
                *self._of_logprobs(batch, objective),
                *self._of_gradients(groups, batch, objective),
            ]

    def _groups(self) -> list[UsableGroup]:
        vocabulary = vocabulary_of(self.policy)
        limits = GroupLimits(vocabulary, self.settings.seq_len)
        tokens = iter(probe_tokens(vocabulary, 2 * (PROMPT_TOKENS + sum(COMPLETION_TOKENS))))
        return [usable_group(i, self._group(tokens), limits) for i in range(2)]

    def _group(self, tokens: Iterator[int]) -> ScoredGroup:
        prompt = [next(tokens) for _ in range(PROMPT_TOKENS)]
        rows = [prompt + [next(tokens) for _ in range(length)] for length in COMPLETION_TOKENS]
        placeholders = [PROMPT_LOGPROB] * PROMPT_TOKENS
        logged = [logprobs_of(self.policy, row)[PROMPT_TOKENS - 1 :].tolist() for row in rows]
        return ScoredGroup(
            tokens=rows,
            masks=[[MASKED] * PROMPT_TOKENS + row[PROMPT_TOKENS:] for row in rows],
            scores=list(SCORES),
            inference_logprobs=[[*placeholders, *row] for row in logged],
        )

    def _batch(self, groups: Sequence[UsableGroup], objective: Objective, tokens: int) -> Batch:
        """Args: tokens: of a micro-batch"""
        cut = self.forward.layout.cut
        batch = collate(groups, self.settings.seq_len, tokens, cut, objective)
        if objective.advantage == "maxent":
            # Without the reference model, higher scores have higher weights.
            alone = replace(objective, maxent_tau=objective.maxent_tau or 1.0)
            batch, _ = with_completion_weights(batch, groups, alone)
        return batch if self.reference is None else self.reference.added(batch)

    def _of_logprobs(self, batch: Batch, objective: Objective) -> Iterator[str]:
        """With dropout as in training."""
        tolerance = tolerance_of(self.policy)
        table = self._gathered(batch, objective).tokens
        if table.mean_distance() > tolerance:
            yield (
                "the logprobs of the training pass differ from those of a plain forward pass by "
                f"{table.mean_distance():.2g} on average (tolerance {tolerance:g}): dropout is on, "
                "or tokens and logprobs are misaligned"
            )

    def _of_gradients(
        self, groups: Sequence[UsableGroup], whole: Batch, objective: Objective
    ) -> Iterator[str]:
        """One micro-batch of all sequences, and one of each, have the same gradient."""
        parts = self._batch(groups, objective, tokens=1)
        with _dropout_at_zero(self.policy):
            expected, found = (self._gradient(batch, objective) for batch in (whole, parts))
        norm = float(expected.norm())
        difference = float((expected - found).norm())
        if not norm:
            yield "the gradient is 0, although no advantage is"
        elif difference > GRADIENT_TOLERANCE * norm:
            yield (
                f"the gradient of {len(parts.micro_batches)} micro-batches differs from the "
                "gradient of the same sequences in one micro-batch by "
                f"{100 * difference / norm:.0f} %: a micro-batch is left out, or padding is counted"
            )

    def _gathered(self, batch: Batch, objective: Objective) -> GradientStats:
        """Run the backward passes and drop the gradients."""
        found = self.accumulate(batch, objective, 0)
        self.optimizer.gradients.clear()
        return found

    def _gradient(self, batch: Batch, objective: Objective) -> Tensor:
        """Some gradients of each tensor, spread over it."""
        gradients, scale = self.optimizer.gradients, self.optimizer.loss_scale
        self.accumulate(batch, objective, 0)
        flat = [gradient.reshape(-1) for gradient in gradients.tensors if gradient is not None]
        some = [g[:: max(1, len(g) // SAMPLED_WEIGHTS)].float() for g in flat]
        found = torch.cat(some).cpu() if some else torch.zeros(1)
        gradients.clear()
        return found / (1.0 if scale is None else scale.value)


def _of_advantages(
    batch: Batch, groups: Sequence[UsableGroup], objective: Objective
) -> Iterator[str]:
    advantages = _in_order(batch).view(len(groups), len(SCORES))
    sums = advantages.sum() if objective.advantage == "batch_std" else advantages.sum(-1)
    expected = len(SCORES) if objective.advantage == "maxent" else 0  # weights are not centred
    worst = float(sums[(sums - expected).abs().argmax()] if sums.dim() else sums)
    if abs(worst - expected) > 1e-4:
        yield (
            f"--advantage {objective.advantage}: the advantages of scores {SCORES} add up to "
            f"{worst:.3g} instead of {expected}"
        )
    if not bool((advantages.argsort(-1) == torch.tensor(SCORES).argsort()).all()):
        yield f"--advantage {objective.advantage}: a higher score has a lower advantage"
    if objective.kl_coef and objective.kl_in == "reward":
        penalties = torch.zeros(len(batch.order))
        penalties[0] = 0.1 * objective.kl_coef
        if not _in_order(with_penalties(batch, groups, objective, penalties))[0] < advantages[0, 0]:
            yield "a KL penalty does not lower the advantage of its completion"


def _in_order(batch: Batch) -> Tensor:
    """[sequences] the advantages, in the order of the groups."""
    advantages = torch.cat([micro.advantages[:, 0] for micro in batch.micro_batches])
    return advantages[torch.tensor(batch.order).argsort()]


def _of_loss(micro: MicroBatch, objective: Objective) -> Iterator[str]:
    """The signs of the loss's parts, by its derivatives."""
    trained, logp = micro.token_weight > 0, micro.behaviour_logp
    ones = torch.ones_like(micro.advantages)
    plain = replace(objective, kl_coef=0.0, entropy_coef=0.0)
    better = _derivatives(replace(micro, advantages=ones), plain)
    if not bool((better.logp[trained] < 0).all()):
        yield "a step would make completions with a positive advantage less likely"
    still = replace(micro, advantages=0 * ones, reference_logp=logp - 0.5)
    if objective.kl_coef and objective.kl_in == "loss":
        away = _derivatives(still, replace(objective, entropy_coef=0.0))
        if not bool((away.logp[trained] > 0).all()):
            yield "the KL penalty drives the policy from the reference model: its sign is wrong"
    if objective.entropy_coef:
        flat = _derivatives(still, replace(objective, kl_coef=0.0))
        if not bool((flat.entropy[trained] < 0).all()):
            yield "the entropy bonus lowers the entropy: its sign is wrong"


def _derivatives(micro: MicroBatch, objective: Objective) -> TokenValues:
    """Of the loss at the policy that sampled, by logprob and by entropy."""
    leaves = TokenValues(
        micro.behaviour_logp.clone().requires_grad_(),
        torch.ones_like(micro.behaviour_logp).requires_grad_(),
        torch.zeros_like(micro.behaviour_logp).requires_grad_(),
    )
    loss = torch.stack(step_loss(leaves, micro, objective)).sum()
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return TokenValues(*(torch.zeros_like(leaves.logp) if g is None else g for g in found))


@contextlib.contextmanager
def _unchanged(loss_scale: LossScale | None, device: torch.device) -> Iterator[None]:
    """Keep the run's random numbers and its loss scale as they are."""
    record = None if loss_scale is None else loss_scale.record
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    if loss_scale is not None and record is not None:
        loss_scale.record = record


@contextlib.contextmanager
def _dropout_at_zero(policy: CausalLM) -> Iterator[None]:
    dropouts = adapter_dropouts(policy)
    before = [module.p for module in dropouts]
    for module in dropouts:
        module.p = 0.0
    try:
        yield
    finally:
        for module, p in zip(dropouts, before, strict=True):
            module.p = p
