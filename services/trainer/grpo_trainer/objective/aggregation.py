"""Token weights: how the losses of single tokens add up to the loss of a batch."""

from __future__ import annotations

from torch import Tensor

from grpo_trainer.objective.recipes import AggregationName


def token_weights(
    is_trained: Tensor, aggregation: AggregationName, sequences: int, tokens: int, constant: int
) -> Tensor:
    """[B, T] weight of each token; 0 if it is not trained on.

    Args:
        is_trained: [B, T] bool, of some of the batch's sequences
        aggregation: sequence: the mean over a sequence's tokens, then over sequences (DeepSeekMath,
            arXiv 2402.03300, equation 3). token: the mean over all tokens (DAPO, arXiv 2503.14476,
            equation 12). constant: the sum over all tokens, divided by a number that does not
            depend on their lengths (Dr. GRPO, arXiv 2503.20783, section 3.2)
        sequences: number of sequences in the batch
        tokens: number of trained tokens in the batch
        constant: divisor for each sequence, in tokens
    """
    trained = is_trained.float()
    if aggregation == "token":
        return trained / max(1, tokens)
    if aggregation == "constant":
        return trained / (sequences * constant)
    return trained / trained.sum(-1, keepdim=True).clamp_min(1) / sequences
