"""The named objectives: a table of their parts. Each loss and each way to compute advantages is one
pure function of the trainer, in `losses` and `advantages`, or the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ObjectiveName = Literal[
    "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "maxent", "distill"
]
AggregationName = Literal["sequence", "token", "constant"]
Level = Literal["token", "sequence"]
CorrectionName = Literal["truncate", "mask", "none"]
KlEstimatorName = Literal["k1", "k2", "k3"]
KlPlace = Literal["loss", "reward", "weights"]
KlControlName = Literal["fixed", "adaptive"]


LOSSES = ("clip", "cispo", "reinforce", "likelihood")
ADVANTAGES = ("group_std", "group_mean", "leave_one_out", "batch_std", "maxent")
"""The names of the trainer's functions, which has them in `NAMED_LOSSES` and `NAMED_ADVANTAGES`."""


@dataclass(frozen=True)
class Objective:
    """What a step minimises.

    Args:
        advantage: one of ADVANTAGES, or FILE.py:FUNCTION
        overlong_buffer: share of the allowed completion length; see `advantages.overlong_penalty`
        reward_coef: multiplies the advantages that follow from scores or that an environment sent
        distill_coef: weight of the teacher's advantages; see `advantages.with_teacher`
        loss: one of LOSSES, or FILE.py:FUNCTION
        clip_eps, clip_eps_high: how far an importance ratio may be below and above 1
        importance_level: of the surrogate's importance ratios
        importance_correction: of tokens or sequences (`importance_correction_level`) whose ratio is
            above `importance_correction_cap`; see `losses.correction`
        aggregation: see `collate.token_weights`
        aggregation_tokens: divisor of the aggregation `constant`; None: --seq-len
        entropy_coef: weight of the bonus for the policy's entropy
        kl_coef: weight of the penalty for the KL divergence from the reference model; see
            `losses.kl_penalty`
        kl_in: whether the penalty is part of the loss, of each completion's score, or of the
            weights of a group's completions (see `advantages`)
        maxent_tau: weight of the entropy of a group's weights; see `advantages`, as for the next
            three
        maxent_q_temperature: divides the scores
        maxent_q_epsilon: least share of a completion
        maxent_length_normalize_ref: divide the reference model's log-likelihood by the tokens
    """

    advantage: str = "group_std"
    overlong_buffer: float = 0.0
    reward_coef: float = 1.0
    distill_coef: float = 0.0
    loss: str = "clip"
    clip_eps: float = 0.2
    clip_eps_high: float = 0.2
    importance_level: Level = "token"
    importance_correction: CorrectionName = "truncate"
    importance_correction_level: Level = "token"
    importance_correction_cap: float = 3.0
    aggregation: AggregationName = "sequence"
    aggregation_tokens: int | None = None
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: KlEstimatorName = "k3"
    kl_in: KlPlace = "loss"
    maxent_tau: float = 0.0
    maxent_q_temperature: float = 1.0
    maxent_q_epsilon: float = 1e-6
    maxent_length_normalize_ref: bool = True


GRPO = Objective()

PRESETS: Mapping[ObjectiveName, Mapping[str, Any]] = {
    # DeepSeekMath, arXiv 2402.03300, equation 3 without its KL term; the average over a sequence's
    # tokens and then over sequences, the deviation of the group's scores.
    "grpo": {},
    # arXiv 2503.20783, section 3.2: neither the deviation nor the sequence's length divides.
    "dr_grpo": {"advantage": "group_mean", "aggregation": "constant"},
    # arXiv 2503.14476, equations 8 (bounds), 12 (mean over tokens) and 13 (long completions). Its
    # dynamic sampling is the environment's: groups of equal scores are replaced.
    "dapo": {"clip_eps_high": 0.28, "aggregation": "token", "overlong_buffer": 0.2},
    # arXiv 2507.18071, equations 5 and 7; the bounds of its section 5.1.
    "gspo": {
        "importance_level": "sequence",
        "clip_eps": 3e-4,
        "clip_eps_high": 4e-4,
        "importance_correction": "none",
    },
    # MiniMax-M1, arXiv 2506.13585, equation 4: no lower bound; the ratio is at most 5, as
    # ScaleRL, arXiv 2510.13786, and TRL recommend. The surrogate itself truncates.
    "cispo": {
        "loss": "cispo",
        "clip_eps_high": 4.0,
        "importance_correction": "none",
        "aggregation": "token",
    },
    # arXiv 2402.14740: REINFORCE on whole completions, each compared with the others.
    "rloo": {
        "advantage": "leave_one_out",
        "loss": "reinforce",
        "aggregation": "constant",
        "kl_estimator": "k1",
        "kl_in": "reward",
    },
    # arXiv 2501.03262: the advantages of all prompts are normalised together.
    "reinforce_plus_plus": {
        "advantage": "batch_std",
        "aggregation": "token",
        "kl_estimator": "k1",
        "kl_in": "reward",
    },
    # Soft policy improvement, arXiv 1806.06920, with the reference model as prior: see
    # `advantages`.
    "maxent": {
        "advantage": "maxent",
        "loss": "likelihood",
        "importance_correction": "none",
        "kl_in": "weights",
    },
    # On-policy distillation, arXiv 2306.13649 (reverse KL divergence on the student's own samples)
    # as a policy gradient: each token's advantage is the teacher's logprob minus the student's.
    "distill": {
        "reward_coef": 0.0,
        "distill_coef": 1.0,
        "loss": "reinforce",
        "aggregation": "token",
    },
}
"""The parts in which a preset differs from `Objective`'s defaults. None has a KL penalty
unless --kl-coef asks for one."""


def resolved(name: ObjectiveName, chosen: Mapping[str, Any]) -> Objective:
    """The preset with the parts that were chosen instead. Args: chosen: None where none was."""
    preset = dict(PRESETS[name])
    given = {part: value for part, value in chosen.items() if value is not None}
    if "clip_eps" in given and "clip_eps_high" not in given | preset:
        preset["clip_eps_high"] = given["clip_eps"]
    return Objective(**preset | given)
