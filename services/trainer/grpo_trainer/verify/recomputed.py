"""Computes a few tokens of a batch again, with a plain forward pass.

This pass is independent of the training step's: without packing, fused head and dropout.

Legend: N tokens, V vocabulary.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_trainer.algo.logprob_comparison import TokenTable
from grpo_trainer.data.collate import Batch
from grpo_trainer.data.micro_batches import by_length
from grpo_trainer.model.adapter import without_dropout
from grpo_trainer.model.policy import CausalLM, device_of

SAMPLE_SEQUENCES, SAMPLE_TOKENS = 64, 16
"""Sequences of a sample, and tokens at each end of a sequence."""
SAMPLE_INPUTS = 2048
"""Tokens of the sequences of a sample, up to the last token that is computed again."""
PASS_TOKENS = 1024
"""Number of tokens in one forward pass; a longer sequence has one of its own."""


def subsample(table: TokenTable) -> TokenTable:
    """A sample that is cheap to compute again: the first and the last tokens of at most 64
    sequences, spread over the batch."""
    sequences = table.sequences()
    chosen = sequences[:: max(1, len(sequences) // SAMPLE_SEQUENCES)][:SAMPLE_SEQUENCES]
    rows = [table.where(table.sequence == number) for number in chosen]
    ends = accumulate(int(row.position.max()) for row in rows)
    affordable = max(1, sum(total <= SAMPLE_INPUTS for total in ends))
    keep = torch.zeros(len(table), dtype=torch.bool)
    for number in chosen[:affordable]:
        places = (table.sequence == number).nonzero()[:, 0]
        keep[places[:SAMPLE_TOKENS]] = keep[places[-SAMPLE_TOKENS:]] = True
    return table.where(keep)


def targets_of(table: TokenTable, batch: Batch) -> Tensor:
    """[N] the table's tokens, in host memory."""
    return torch.cat([tokens[trained] for tokens, trained in _sequences(table, batch)])


@torch.no_grad()
def logits_of(policy: CausalLM, table: TokenTable, batch: Batch) -> Tensor:
    """[N, V] float32, the logits that predict the table's tokens."""
    device = device_of(policy)
    sequences = _sequences(table, batch)
    logits: dict[int, Tensor] = {}  # by index of the sequence
    with without_dropout(policy):
        for part in by_length([tokens[:-1].tolist() for tokens, _ in sequences], PASS_TOKENS):
            rows = pad_sequence([sequences[i][0][:-1] for i in part], batch_first=True)
            answers = policy(input_ids=rows.to(device), use_cache=False).logits  # [B, T, V]
            for i, answer in zip(part, answers, strict=True):
                logits[i] = answer[sequences[i][1].to(device) - 1].float()
    return torch.cat([logits[i] for i in range(len(sequences))])


def _sequences(table: TokenTable, batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """Of each sequence the tokens up to the last trained one, and the positions of the table's."""
    positions = [(n, table.position[table.sequence == n]) for n in table.sequences()]
    return [(batch.tokens(n, int(trained.max()) + 1), trained) for n, trained in positions]
