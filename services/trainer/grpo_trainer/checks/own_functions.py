"""Calls the user's own loss and advantages with a small worked batch, before the first step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_trainer.errors import FunctionUnusable
from grpo_trainer.functions import imported
from grpo_trainer.losses import LossInputs
from grpo_trainer.objectives import ADVANTAGES, LOSSES, Objective

SCORES = ((0.0, 1.0, 2.0), (5.0, 5.0))
"""Of two groups, for a check of advantages."""


def require_own_functions(objective: Objective) -> None:
    """Load the user's own functions, if there are some, and call each with a small worked batch.

    Raises:
        FunctionUnusable: names the option, and what is wrong with the result.
    """
    if objective.advantage not in ADVANTAGES:
        _checked("--advantage", objective.advantage, _problem_of_advantages)
    if objective.loss not in LOSSES:
        _checked("--loss", objective.loss, functools.partial(_problem_of_loss, objective=objective))


def _checked(option: str, path: str, problem_of: Callable[[Callable[..., Any]], str]) -> None:
    try:
        problem = problem_of(imported(path))
    except FunctionUnusable as error:
        raise FunctionUnusable(f"{option} {error}") from error
    except Exception as error:  # noqa: BLE001 - of the user's code
        problem = f"it raised {type(error).__name__}: {error}"
    if problem:
        raise FunctionUnusable(
            f"{option} {path}, called with a small batch before the first step: {problem}"
        )


def _problem_of_advantages(own: Callable[..., Any]) -> str:
    scores = [torch.tensor(group, dtype=torch.float64) for group in SCORES]
    found = own(scores)
    if [getattr(group, "shape", None) for group in found] != [group.shape for group in scores]:
        return (
            "expected a list with a tensor for each group, of as many advantages as the group has "
            f"scores ({', '.join(str(len(group)) for group in SCORES)})"
        )
    if not all(bool(group.isfinite().all()) for group in found):
        return f"an advantage of scores {list(map(list, SCORES))} is NaN or infinite"
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
    return ""
