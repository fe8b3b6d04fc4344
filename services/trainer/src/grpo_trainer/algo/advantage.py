"""Group-relative advantages: how much better than its siblings a completion scored."""

from __future__ import annotations

import torch
from torch import Tensor

MIN_STD = 1e-8


def group_advantages(scores: Tensor) -> Tensor:
    """Centre the scores of one group and divide by their standard deviation.

    DeepSeekMath (arXiv 2402.03300), section 4.1.2, outcome supervision. The deviation is the
    population's (divided by n), as in the archived Atropos trainer; a group of equal scores, or
    of one sequence, teaches nothing and gets zeros.

    Args:
        scores: [n]
    Returns:
        [n] float32
    """
    centred = scores.double() - scores.double().mean()
    # Rounding leaves a deviation of about 1e-17 in a group of equal scores; the floor makes
    # those zeros instead of noise of size one.
    return (centred / centred.square().mean().sqrt().clamp_min(MIN_STD)).to(torch.float32)
