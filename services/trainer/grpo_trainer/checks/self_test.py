"""Before the first step: calls the user's own functions, and takes a step without an update.

Both get a small batch that is made here, so that the right results are known. In the step,
behaviour logprobs are the policy's own, and no advantage is 0. Everything else is the run's: model,
objective, micro-batches and gradients; but functions of the user's own are left out, because an
advantage or a gradient of 0 may be right there.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog
import torch
from torch import Tensor

from grpo_core.tree.objectives import ADVANTAGES, GRPO, LOSSES, Objective
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.advantages import with_advantages
from grpo_trainer.checks.definitions import broken_definitions
from grpo_trainer.checks.identities import (
    COMPLETION_TOKENS,
    LARGE,
    LONGEST,
    PROMPT_TOKENS,
    SCORES,
    broken_identities,
    scored_group,
    token_rows,
)
from grpo_trainer.data.collate import Batch, broadcast_batch, collate
from grpo_trainer.data.groups import GroupLimits, UsableSequence, sequences_of
from grpo_trainer.errors import FunctionUnusable, NonFiniteStep, SelfTestFailed
from grpo_trainer.functions import forget_own_functions, own_function
from grpo_trainer.learner import GradientStats, Learner
from grpo_trainer.losses import LossInputs
from grpo_trainer.model.adapter import adapter_dropouts
from grpo_trainer.model.division import division_of
from grpo_trainer.model.logprobs import logprobs_of, probe_tokens, tolerance_of
from grpo_trainer.model.policy import CausalLM, device_of, vocabulary_of
from grpo_trainer.optim.loss_scale import LossScale
from grpo_trainer.ranks import ALONE, Ranks

log = structlog.get_logger()

GRADIENT_TOLERANCE = 0.1
"""Relative difference of two ways to compute one gradient. In bfloat16 rounding reaches a few per
cent. Without one of the eight sequences, the gradient changes by about a third."""
SAMPLED_WEIGHTS = 1024
"""Gradients compared per tensor, about: a second copy of all would double their memory."""


@dataclass(frozen=True)
class SelfTest:
    """Computes a step of the learner without an update."""

    learner: Learner

    def require(self) -> None:
        """Raises:
        SelfTestFailed: lists every part that gives a wrong result.
        """
        if self.learner.settings.seq_len < LONGEST:
            log.info("self_test.skipped", reason=f"--seq-len is below {LONGEST} tokens")
            return
        problems = self._problems()
        if problems:
            raise SelfTestFailed(
                "Before the first step, the trainer computed a step without an update, and "
                f"{len(problems)} of its results are wrong:\n"
                + "\n".join(f"  - {problem}" for problem in problems)
                + "\nNo weight was changed. Undo changes of the trainer's code, or report this"
            )
        log.info("self_test.passed")

    def _problems(self) -> list[str]:
        objective = with_named_functions(self.learner.settings.resolved_objective)
        with _unchanged(self.learner.optimizer.loss_scale, device_of(self.learner.policy)):
            sequences = self._sequences()
            whole, parts = (self._batch(sequences, objective, tokens) for tokens in (LARGE, 1))
            try:
                return [
                    *broken_identities(objective),
                    *broken_definitions(objective),
                    *self._of_logprobs(whole, objective),
                    *self._of_gradients(whole, parts, objective),
                ]
            except NonFiniteStep:
                self.learner.optimizer.gradients.clear()
                return ["the loss or a gradient is NaN or infinite: the weights may be damaged"]

    def _sequences(self) -> list[UsableSequence]:
        """On rank 0, with the policy's own logprobs."""
        if not self.learner.ranks.leads:
            self.learner.follow()
            return []
        self.learner.orders.begin()
        found = self._alone()
        self.learner.orders.end()
        return found

    def _alone(self) -> list[UsableSequence]:
        vocabulary = vocabulary_of(self.learner.policy)
        limits = GroupLimits(vocabulary, self.learner.settings.seq_len)
        tokens = iter(probe_tokens(vocabulary, 2 * (PROMPT_TOKENS + sum(COMPLETION_TOKENS))))
        return sequences_of([self._group(tokens, scores) for scores in SCORES], limits)

    def _group(self, tokens: Iterator[int], scores: Sequence[float]) -> ScoredGroup:
        rows = token_rows(tokens)
        logged = [
            logprobs_of(self.learner.policy, row)[PROMPT_TOKENS - 1 :].tolist() for row in rows
        ]
        return scored_group(rows, logged, scores)

    def _batch(
        self, sequences: Sequence[UsableSequence], objective: Objective, tokens: int
    ) -> Batch:
        """Args: sequences: on rank 0; tokens: of a micro-batch"""
        batch = None
        if sequences:
            cut = self.learner.forward.layout.cut
            batch = collate(sequences, self.learner.settings.seq_len, tokens, cut, objective)
        batch = broadcast_batch(batch, self.learner.ranks)
        if not objective.maxent_tau:
            objective = replace(objective, maxent_tau=1.0)
        batch = self.learner.with_reference(batch)
        return with_advantages(batch, objective, self.learner.ranks)

    def _of_logprobs(self, batch: Batch, objective: Objective) -> Iterator[str]:
        """With dropout as in training."""
        tolerance = tolerance_of(self.learner.policy)
        table = self._gathered(batch, objective).tokens
        if table.mean_distance() > tolerance:
            yield (
                "the logprobs of the training pass differ from those of a plain forward pass by "
                f"{table.mean_distance():.2g} on average (tolerance {tolerance:g}): dropout is on, "
                "or tokens and logprobs are misaligned"
            )

    def _of_gradients(self, whole: Batch, parts: Batch, objective: Objective) -> Iterator[str]:
        """One micro-batch of all sequences, and one of each, have the same gradient; each rank
        computes the first one alone. Without clipping, because rounding may move ratios near 1
        across a narrow bound, as that of GSPO."""
        objective = replace(objective, clip_eps=math.inf, clip_eps_high=math.inf)
        ranks, policy = self.learner.ranks, self.learner.policy
        added_up = ranks.count if division_of(policy) else 1  # by the passes of a divided policy
        with _dropout_at_zero(policy):
            expected = self._gradient(whole, objective, ALONE) / added_up
            found = self._gradient(parts, objective, ranks)
        norm = float(expected.norm())
        difference = float((expected - found).norm())
        if not norm:
            yield "the gradient is 0, although no advantage is"
        elif difference > GRADIENT_TOLERANCE * norm:
            count, factor = len(parts.micro_batches), float(expected @ found) / norm**2
            if float((found - factor * expected).norm()) < GRADIENT_TOLERANCE * factor * norm:
                yield (
                    f"the gradient of {count} micro-batches is {factor:.3g} times the gradient of "
                    "the same sequences in one micro-batch: each loss is divided by the number of "
                    "micro-batches, or multiplied by that of the ranks"
                )
                return
            yield (
                f"the gradient of {len(parts.micro_batches)} micro-batches differs from the "
                "gradient of the same sequences in one micro-batch by "
                f"{100 * difference / norm:.0f} %: a micro-batch is left out, padding is counted, "
                "or the ranks' gradients are not added up"
            )

    def _gathered(self, batch: Batch, objective: Objective) -> GradientStats:
        """Run the backward passes and drop the gradients."""
        stats = self.learner.accumulate_once(batch, objective, 0)
        self.learner.optimizer.gradients.clear()
        return stats

    def _gradient(self, batch: Batch, objective: Objective, ranks: Ranks) -> Tensor:
        """Some gradients of each tensor, spread over it."""
        gradients, scale = self.learner.optimizer.gradients, self.learner.optimizer.loss_scale
        replace(self.learner, ranks=ranks).accumulate_once(batch, objective, 0)
        flat = [gradient.reshape(-1) for gradient in gradients.tensors if gradient is not None]
        some = [g[:: max(1, len(g) // SAMPLED_WEIGHTS)].float() for g in flat]
        found = torch.cat(some).cpu() if some else torch.zeros(1)
        gradients.clear()
        return found / (1.0 if scale is None else scale.value)


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


GROUPS_OF_SCORES = ((0.0, 1.0, 2.0), (5.0, 5.0))
"""For a check of the user's own advantages."""


def with_named_functions(objective: Objective) -> Objective:
    """The objective with GRPO's loss and advantages in the place of the user's own."""
    loss = objective.loss if objective.loss in LOSSES else GRPO.loss
    advantage = objective.advantage if objective.advantage in ADVANTAGES else GRPO.advantage
    return replace(objective, loss=loss, advantage=advantage)


def require_own_functions(objective: Objective) -> None:
    """Load the user's own functions, if there are some, and call each with a small worked batch.
    A job of a sweep must not start with the state that the previous one left in them.

    Raises:
        FunctionUnusable: names the option, and what is wrong with the result.
    """
    forget_own_functions()
    if objective.advantage not in ADVANTAGES:
        _checked("--advantage", objective.advantage, _problem_of_advantages)
    if objective.loss not in LOSSES:
        _checked("--loss", objective.loss, functools.partial(_problem_of_loss, objective=objective))


def _checked(option: str, path: str, problem_of: Callable[[Callable[..., Any]], str]) -> None:
    try:
        problem = problem_of(own_function(path))
    except FunctionUnusable as error:
        raise FunctionUnusable(f"{option} {error}") from error
    if problem:
        raise FunctionUnusable(
            f"{option} {path}, called with a small batch before the first step: {problem}"
        )


def _problem_of_advantages(own: Callable[..., Any]) -> str:
    scores = [torch.tensor(group, dtype=torch.float64) for group in GROUPS_OF_SCORES]
    found = own(scores)
    if [getattr(group, "shape", None) for group in found] != [group.shape for group in scores]:
        return (
            "expected a list with a tensor for each group, of as many advantages as the group has "
            f"scores ({', '.join(str(len(group)) for group in GROUPS_OF_SCORES)})"
        )
    if not all(bool(group.isfinite().all()) for group in found):
        return f"an advantage of scores {list(map(list, GROUPS_OF_SCORES))} is NaN or infinite"
    return ""


def _problem_of_loss(own: Callable[..., Any], objective: Objective) -> str:
    """Two sequences, of which three tokens and one are trained on; one advantage is positive."""
    logp = torch.tensor([[-1.0, -0.5, -2.0], [-0.7, -3.0, -3.0]], requires_grad=True)
    behaviour_logp = torch.tensor([[-1.0, -0.6, -2.0], [-0.7, 1.0, 1.0]])
    inputs = LossInputs(
        logp=logp,
        behaviour_logp=behaviour_logp,
        ratio=(logp - behaviour_logp).exp(),
        advantages=torch.tensor([[0.5], [-0.5]]),
        weight=torch.tensor([[1 / 6, 1 / 6, 1 / 6], [1 / 2, 0.0, 0.0]]),
        entropy=torch.ones_like(behaviour_logp),
        reference_logp=behaviour_logp.clone() if objective.kl_coef else None,
    )
    loss = own(inputs, objective)
    if not isinstance(loss, Tensor) or loss.dim():
        return "expected a scalar tensor, the sum over all tokens of weight times their loss"
    if not loss.isfinite():
        return f"the loss is {float(loss.detach())}"
    if not loss.requires_grad:
        return "the loss has no gradient: compute it from `logp` or `ratio`"
    (gradient,) = torch.autograd.grad(loss, logp, allow_unused=True)
    if gradient is None or not bool(gradient.isfinite().all()) or not bool(gradient.any()):
        return "the gradient with respect to `logp` is missing, 0, NaN or infinite"
    if bool(gradient[inputs.weight == 0].any()):
        return "tokens whose weight is 0 have a gradient: multiply each token's loss by `weight`"
    for broken in broken_identities(replace(objective, advantage=GRPO.advantage)):
        return f"{broken}: return the sum of weight times loss, without a mean over the micro-batch"
    if bool((gradient[0] > 0).all()):
        log.warning(
            "loss.sign",
            reason="--loss makes all tokens of a completion with a positive advantage less likely",
            hint="a loss is minimised: it is minus the sum of weight times ratio times advantage. "
            "Correct it, then train anew from the base model, or from a checkpoint from before "
            "this loss: to resume a later one keeps what this loss has spoiled",
        )
    return ""
