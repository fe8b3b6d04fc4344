"""Computes a few tokens of a batch again, with a plain forward pass.

This pass is independent of the training step's: without packing, fused head and dropout.

Legend: N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_trainer.algo.logprob_comparison import TokenTable
from grpo_trainer.data.collate import Batch
from grpo_trainer.data.micro_batches import by_length
from grpo_trainer.model.adapter import without_dropout
from grpo_trainer.model.policy_protocol import CausalLM, base_model, device_of

SAMPLE_TOKENS = 256
SAMPLE_SEQUENCES = 16
PASS_TOKENS = 1024
"""Number of tokens in one forward pass; a longer sequence has one of its own."""
CHUNK_LOGITS = 1 << 22


def subsample(table: TokenTable) -> TokenTable:
    """A sample that is cheap to compute again: at most 256 tokens of at most 16 sequences."""
    few = table.where(
        torch.isin(table.sequence, torch.tensor(table.sequences()[:SAMPLE_SEQUENCES]))
    )
    return few.where(torch.arange(len(few)) < SAMPLE_TOKENS)


def targets_of(table: TokenTable, batch: Batch) -> Tensor:
    """[N] the table's tokens, in host memory."""
    return torch.cat([tokens[trained] for tokens, trained in _sequences(table, batch)])


@torch.no_grad()
def logits_of(policy: CausalLM, table: TokenTable, batch: Batch) -> Tensor:
    """[N, V] float32, the logits that predict the table's tokens."""
    return _outputs(policy, table, batch, lambda **inputs: policy(**inputs).logits).float()


@torch.no_grad()
def logit_chunks(
    policy: CausalLM, table: TokenTable, batch: Batch, splits_head: bool
) -> Iterator[Tensor]:
    """The rows of `logits_of` in their order.

    Args: splits_head: compute a few rows at a time, which the model must allow (`fused_head`)
    """
    if not splits_head:
        yield logits_of(policy, table, batch)
        return
    model = base_model(policy)
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    hidden = _outputs(policy, table, batch, lambda **i: decoder(**i).last_hidden_state)  # [N, H]
    for rows in torch.split(hidden, max(1, CHUNK_LOGITS // int(policy.config.vocab_size))):
        yield head(rows).float()


def _outputs(
    policy: CausalLM, table: TokenTable, batch: Batch, model: Callable[..., Tensor]
) -> Tensor:
    """[N, ...] what `model` computes where it predicts the table's tokens."""
    device = device_of(policy)
    sequences = _sequences(table, batch)
    found: dict[int, Tensor] = {}  # by index of the sequence
    with without_dropout(policy):
        for part in by_length([tokens[:-1].tolist() for tokens, _ in sequences], PASS_TOKENS):
            rows = pad_sequence([sequences[i][0][:-1] for i in part], batch_first=True)
            answers = model(input_ids=rows.to(device), use_cache=False)  # [B, T, ...]
            for i, answer in zip(part, answers, strict=True):
                found[i] = answer[sequences[i][1].to(device) - 1]
    return torch.cat([found[i] for i in range(len(sequences))])


def _sequences(table: TokenTable, batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """Of each sequence the tokens up to the last trained one, and the positions of the table's."""
    positions = [(n, table.position[table.sequence == n]) for n in table.sequences()]
    return [(batch.tokens(n, int(trained.max()) + 1), trained) for n, trained in positions]
