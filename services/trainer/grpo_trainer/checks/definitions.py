"""Compares parts of an objective with their definitions, on a few tokens and scores.

A loss may keep every identity of `identities` and still have a sign, a bound or a baseline wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from grpo_core.tree.objectives import ADVANTAGES, Objective
from grpo_trainer.advantages import NAMED_ADVANTAGES
from grpo_trainer.data.collate import MicroBatch
from grpo_trainer.losses import LossInputs, policy_loss, step_loss
from grpo_trainer.model.logprobs import TokenValues

INSIDE, OUTSIDE = 0.98, 1.02
"""Distances of ratios from 1, in parts of the clipping range."""
TOLERANCE = 1e-3
OF_BATCH = ("batch_std", "maxent")
"""Advantages that compare a completion with those of other groups, too, or that are weights."""
SCORES = ((0.0, 1.0, 2.0), (5.0, 7.0))
ABOVE_REFERENCE = 0.5
"""How much more a token's logprob is than the reference model's, in nats."""


def broken_definitions(objective: Objective) -> Iterator[str]:
    """What the objective's own parts get wrong; functions of the user's own are not tried."""
    if objective.loss == "clip":
        yield from _of_clipping(objective)
    if objective.kl_coef and objective.kl_in == "loss":
        yield from _of_penalty(objective)
    if objective.advantage in ADVANTAGES and objective.advantage not in OF_BATCH:
        yield from _of_advantages(objective)


def _of_clipping(objective: Objective) -> Iterator[str]:
    """A token's gradient is -ratio * A within the bounds, and 0 outside."""
    low, high = objective.clip_eps, objective.clip_eps_high
    cases = [(1 + s * high, 1.0) for s in (INSIDE, OUTSIDE)]
    cases += [(1 - s * low, -1.0) for s in (INSIDE, OUTSIDE)]
    kept = [i for i, (r, _) in enumerate(cases) if 0 < r < objective.importance_correction_cap]
    ratio, advantage = torch.tensor(cases).unbind(-1)
    logp = ratio.log().nan_to_num().unsqueeze(-1).requires_grad_()  # [4, 1]
    inputs = LossInputs.of(_values(logp), _tokens(advantage), objective)
    (gradient,) = torch.autograd.grad(policy_loss(inputs, objective), logp)
    found = (gradient[:, 0] / -advantage)[kept]
    expected = (ratio * torch.tensor([1.0, 0.0, 1.0, 0.0]))[kept]
    if torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE):
        return
    if torch.allclose(found, torch.ones_like(found)):
        yield "the importance ratio is 1 for every token, whatever its behaviour logprob is"
        return
    yield (
        f"importance ratios are not clipped as --clip-eps {low:g} (below 1) and --clip-eps-high "
        f"{high:g} (above 1) say"
    )


def _of_penalty(objective: Objective) -> Iterator[str]:
    """Every estimate is above 0 and grows with the logprob if the policy's is the larger one."""
    logp = torch.zeros(1, 1, requires_grad=True)
    penalty = step_loss(_values(logp), _tokens(torch.ones(1)), objective).kl
    gradient = torch.autograd.grad(penalty, logp)[0] if penalty.requires_grad else logp
    value = float(penalty.detach())
    if not value > 0 or not bool(gradient > 0):
        yield (
            f"the KL penalty of --kl-coef {objective.kl_coef:g} is {value:g} for a token "
            f"that the policy finds {ABOVE_REFERENCE} nats more probable than the reference model: "
            "it must be above 0, and grow with this distance"
        )


def _of_advantages(objective: Objective) -> Iterator[str]:
    function = NAMED_ADVANTAGES[objective.advantage]
    found = function([torch.tensor(scores, dtype=torch.float64) for scores in SCORES])
    for scores, values in zip(SCORES, found, strict=True):
        if abs(float(values.sum())) > TOLERANCE or not bool((values.diff() > 0).all()):
            yield (
                f"the advantages of a group with scores {list(scores)} are "
                f"{[round(value, 3) for value in values.tolist()]}: they must add up to 0, and be "
                "higher for higher scores"
            )


def _values(logp: Tensor) -> TokenValues:
    zeros = torch.zeros_like(logp)
    return TokenValues(logp, zeros, zeros)


def _tokens(advantages: Tensor) -> MicroBatch:
    """Sequences of one token with weight 1 and behaviour logprob 0. Args: advantages: [B]"""
    zeros, size = torch.zeros(len(advantages), 1), len(advantages)
    return MicroBatch(
        inputs=zeros.long(),
        targets=zeros.long(),
        behaviour_logp=zeros,
        token_weight=torch.ones_like(zeros),
        advantages=advantages.unsqueeze(-1),
        temperature=torch.ones(size),
        lengths=(1,) * size,
        shared=(0,) * size,
        is_logged=(True,) * size,
        reference_logp=zeros - ABOVE_REFERENCE,
    )
