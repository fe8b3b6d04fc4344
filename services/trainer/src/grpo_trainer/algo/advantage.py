"""Group-relative advantages: how much better a completion scored than others of its group."""

from __future__ import annotations

import torch
from torch import Tensor

MIN_STD = 1e-8


def group_advantages(scores: Tensor) -> Tensor:
    """Centre the scores of one group and divide by their standard deviation.

    DeepSeekMath (arXiv 2402.03300), section 4.1.2, outcome supervision. The deviation is the
    population's (divided by n), as in the archived trainer. A group of one sequence, or of equal
    scores, gets zeros, because it has nothing to teach.

    Args:
        scores: [n]
    Returns:
        [n] float32
    """
    centred = scores.double() - scores.double().mean()
    # Rounding leaves a deviation of about 1e-17 in a group of equal scores. The floor turns its
    # advantages into zeros instead of noise of size one.
    return (centred / centred.square().mean().sqrt().clamp_min(MIN_STD)).to(torch.float32)
