"""Rollouts of a step whose numbers can be checked by hand."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_core.tree.objectives import GRPO
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.data.groups import GroupLimits, Tokens, UsableSequence, sequences_of
from grpo_trainer.model.logprobs import TokenValues
from grpo_trainer.telemetry.rollouts import StepRollouts
from grpo_trainer.token_table import TokenTable
from tests.unit.trainer.groups import VOCABULARY, batch_of


def shuffled(sequences: Sequence[Tokens], size: int) -> list[list[int]]:
    """The last sequence first, `size` in each micro-batch, as a packed batch reorders them."""
    numbers = list(range(len(sequences)))[::-1]
    return [numbers[i : i + size] for i in range(0, len(numbers), size)]


def rollouts_of(
    sequences: list[UsableSequence], seq_len: int = 100, step: int = 6, size: int = 2
) -> StepRollouts:
    """The trainer's logprob of token t is -t / 100."""
    batch = batch_of(sequences, GRPO, seq_len, size, shuffled)
    values = [TokenValues(*[-micro.targets / 100] * 3) for micro in batch.micro_batches]
    tokens = TokenTable.of(batch.micro_batches, values)
    return StepRollouts(step, epoch=1, batch=batch, tokens=tokens)


def usable_of(*sent: ScoredGroup) -> list[UsableSequence]:
    """Logprobs may be missing."""
    return sequences_of(sent, GroupLimits(VOCABULARY, 100, recomputes=True))
