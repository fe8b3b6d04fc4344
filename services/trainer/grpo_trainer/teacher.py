"""On-policy distillation: advantages of single tokens from a teacher's logprobs.

Legend: B sequences of a micro-batch, T targets (see `MicroBatch`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_core.tree.objectives import Objective
from grpo_core.wire.fields import MASKED
from grpo_trainer.data.collate import Batch, TeacherDistance
from grpo_trainer.data.groups import UsableGroup
from grpo_trainer.kl import MAX_LOG_RATIO


def with_teacher(advantages: Tensor, gaps: Tensor, objective: Objective) -> Tensor:
    """[B, T] reward_coef A + distill_coef (log p_teacher - log p_student).

    With A = 0, their policy gradient is that of the reverse KL divergence from the teacher, on what
    the student samples (arXiv 2306.13649 and 2306.08543).

    Args:
        advantages: [B, 1] or [B, T]
        gaps: [B, T] as of `teacher_gaps`
    """
    return objective.reward_coef * advantages + objective.distill_coef * gaps.nan_to_num(nan=0.0)


def teacher_gaps(usable: UsableGroup, sequence: int) -> list[float]:
    """[T] log p_teacher - log p_student of each target of a sequence, bounded. NaN where the
    teacher gave no logprob, and where nothing is trained on.

    The student is the policy that sampled the token.
    """
    targets = zip(
        usable.group.teacher_logprobs(sequence)[1:],
        usable.inference_logprobs[sequence][1:],
        usable.group.masks[sequence][1:],
        strict=True,
    )
    return [
        max(-MAX_LOG_RATIO, min(MAX_LOG_RATIO, teacher - student))
        if teacher is not None and mask != MASKED
        else math.nan
        for teacher, student, mask in targets
    ]


def distance(batch: Batch, gaps: Sequence[Tensor]) -> TeacherDistance:
    """Args: gaps: [B, T] of each micro-batch"""
    pairs = zip(gaps, batch.micro_batches, strict=True)
    trained = torch.cat([gap[micro.token_weight > 0].double() for gap, micro in pairs])
    known = trained[~trained.isnan()]
    reverse_kl = -float(known.mean()) if len(known) else None
    return TeacherDistance(reverse_kl, len(known) / max(1, len(trained)))
