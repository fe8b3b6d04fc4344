"""Identities of a loss, on two groups that are made here. They hold up to rounding of float32.

A loss is a sum over the tokens of a batch. So its division into micro-batches, their padding and
the order of the groups change nothing, twice the weights double it, and a coefficient of 0 leaves
no trace of its option. They need no model, and together take a few hundredths of a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor

from grpo_core.tree.objectives import LOSSES, Objective
from grpo_core.wire.fields import MASKED, PROMPT_LOGPROB
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.advantages import with_advantages
from grpo_trainer.data.collate import MicroBatch, collate
from grpo_trainer.data.cuts import by_length
from grpo_trainer.data.groups import GroupLimits, sequences_of
from grpo_trainer.losses import step_loss
from grpo_trainer.model.logprobs import TokenValues

PROMPT_TOKENS = 6
COMPLETION_TOKENS = (2, 3, 5, 4)
SCORES = ((1.0, 0.0, 0.25, 0.75), (0.25, 0.75, 0.0, 1.0))
"""Of two groups, whose advantages are then told apart by any mistake in their order."""
TEACHER_LOGPROB = -1.0
"""Of prompt tokens. Those of a completion are the policy's minus its score minus 1."""
LONGEST = PROMPT_TOKENS + max(COMPLETION_TOKENS)
LARGE = 2 * len(COMPLETION_TOKENS) * LONGEST
"""Tokens of a micro-batch that holds all sequences."""
VOCABULARY = 1 + 2 * (PROMPT_TOKENS + sum(COMPLETION_TOKENS))
SPREAD = 0.5
"""Bound of the log importance ratios: some are clipped, and others are not."""
TOLERANCE = 1e-4
"""Relative. Sums of float32 in another order differ by about 1e-7."""


def scored_group(
    rows: list[list[int]], logged: Sequence[list[float]], scores: Sequence[float]
) -> ScoredGroup:
    """A group with a teacher.

    Args:
        rows: tokens of each sequence
        logged: logprobs of each completion
    """
    placeholders = [PROMPT_LOGPROB] * PROMPT_TOKENS
    return ScoredGroup(
        tokens=rows,
        masks=[[MASKED] * PROMPT_TOKENS + row[PROMPT_TOKENS:] for row in rows],
        scores=[*scores],
        inference_logprobs=[[*placeholders, *row] for row in logged],
        distill_token_ids=[[[token] for token in row] for row in rows],
        distill_logprobs=[
            [*([TEACHER_LOGPROB] for _ in placeholders), *([logp - score - 1] for logp in row)]
            for row, score in zip(logged, scores, strict=True)
        ],
    )


def token_rows(tokens: Iterator[int]) -> list[list[int]]:
    """Of the sequences of one group."""
    prompt = [next(tokens) for _ in range(PROMPT_TOKENS)]
    return [prompt + [next(tokens) for _ in range(length)] for length in COMPLETION_TOKENS]


def broken_identities(objective: Objective) -> Iterator[str]:
    """Those that the objective's loss, or its gradient, breaks."""
    objective = replace(objective, maxent_tau=objective.maxent_tau or 1.0)
    groups = _groups()
    whole = _outcome(groups, objective)
    found = {
        "the loss of micro-batches of one sequence each differs from the loss of the same "
        "sequences in one micro-batch, with padding": _outcome(groups, objective, micro_batch=1),
        "the loss depends on the order of the groups": _outcome(groups[::-1], objective),
        "twice the weights of all tokens do not double the loss": _outcome(
            groups, objective, factor=2.0
        )
        / 2,
    }
    yield from (name for name, outcome in found.items() if _differ(whole, outcome))
    off = replace(objective, entropy_coef=0.0, kl_coef=0.0, distill_coef=0.0)
    if objective.loss in LOSSES and _differ(
        _outcome(groups, off), _outcome(groups, off, has_options=False)
    ):
        yield "an option whose coefficient is 0 changes the loss"


def _groups() -> list[ScoredGroup]:
    """No token is in them twice, so each has a logprob and a gradient of its own."""
    tokens = count(1)
    rows = [token_rows(tokens) for _ in SCORES]
    logged = [
        [[-1 - token % 7 / 8 for token in row[PROMPT_TOKENS:]] for row in group] for group in rows
    ]
    return [*map(scored_group, rows, logged, SCORES)]


def _outcome(
    groups: Sequence[ScoredGroup],
    objective: Objective,
    micro_batch: int = LARGE,
    factor: float = 1.0,
    has_options: bool = True,
) -> Tensor:
    """[1 + V] the loss of a step, and its gradient with respect to the logprob of each token.

    Args:
        micro_batch: in tokens
        factor: of all weights
        has_options: there are a reference model, a teacher and entropies
    """
    if not has_options:
        none = {"distill_token_ids": None, "distill_logprobs": None}
        groups = [group.model_copy(update=none) for group in groups]
    sequences = sequences_of(groups, GroupLimits(VOCABULARY, LONGEST))
    batch = collate(sequences, LONGEST, micro_batch, by_length, objective)
    if has_options:
        batch = replace(batch, micro_batches=[_with_reference(m) for m in batch.micro_batches])
    batch = with_advantages(batch, objective)
    moved = (SPREAD * torch.arange(VOCABULARY).sin()).requires_grad_()
    total = torch.zeros(())
    for micro in batch.micro_batches:
        logp = micro.behaviour_logp + moved[micro.targets]
        entropy = logp.square() if has_options else torch.full_like(logp, torch.nan)
        values = TokenValues(logp, entropy, logp.detach())
        heavier = replace(micro, token_weight=factor * micro.token_weight)
        total = total + sum(step_loss(values, heavier, objective))
    (gradient,) = torch.autograd.grad(total, moved)
    return torch.cat([total.detach()[None], gradient])


def _with_reference(micro: MicroBatch) -> MicroBatch:
    return replace(micro, reference_logp=micro.behaviour_logp - micro.targets.cos().square())


def _differ(expected: Tensor, found: Tensor) -> bool:
    return not float((expected - found).norm()) <= TOLERANCE * float(expected.norm())
