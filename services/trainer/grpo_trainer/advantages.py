"""Advantages: how much better a completion scored than others.

`with_advantages` is the stage of the loop. The named functions take the scores of a batch's groups,
[n] each, and return their advantages, [n] float64 each. So does the user's own,
`--advantage my.py:advantage`. MaxEnt-GRPO's `maxent` takes the batch. On-policy distillation adds
advantages of single tokens from a teacher's logprobs.

Legend: n completions of one group, N sequences of the batch in the order of the groups, B sequences
of a micro-batch with T targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from statistics import fmean

import torch
from torch import Tensor

from grpo_core.tree.objectives import KlEstimatorName, Objective
from grpo_core.wire.fields import MASKED
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.data.collate import Batch, TeacherDistance
from grpo_trainer.data.groups import UsableSequence
from grpo_trainer.errors import FunctionUnusable
from grpo_trainer.functions import own_function
from grpo_trainer.losses import MAX_LOG_RATIO, kl_terms
from grpo_trainer.ranks import ALONE, Ranks

MIN_STD = 1e-8
"""Rounding leaves a deviation of about 1e-17 among equal scores. This floor turns their advantages
into zeros instead of noise of size one."""


def with_advantages(batch: Batch, objective: Objective, ranks: Ranks = ALONE) -> Batch:
    """The batch with the advantages of its sequences: those that the environment sent, else
    computed from the scores. Rank 0 computes them, and sends them to the others.

    Args: batch: with the reference model's logprobs if there is one
    """
    columns, entropy, teacher, sequences = None, None, None, batch.sequences
    if sequences:
        computed, entropy = _computed(batch, objective)
        values = [computed[number] for number in batch.order]
        columns = _columns(batch, map(_of_targets, sequences, values))
        if objective.distill_coef:
            gaps = _columns(batch, map(teacher_gaps, sequences))
            teacher = distance(batch, gaps)
            zero = _columns(batch, ([float(one.zero_advantage)] for one in sequences))
            columns = [
                with_teacher(column, gap, objective).masked_fill(closed > 0, 0.0)
                for column, gap, closed in zip(columns, gaps, zero, strict=True)
            ]
    columns = ranks.broadcast(columns, "the advantages") or []
    found = zip(batch.micro_batches, columns, strict=True)
    micro_batches = [replace(micro, advantages=column) for micro, column in found]
    return replace(batch, micro_batches=micro_batches, weights_entropy=entropy, teacher=teacher)


def _computed(batch: Batch, objective: Objective) -> tuple[list[float], float | None]:
    """[N], and the entropy of MaxEnt-GRPO's weights."""
    groups = batch.groups
    has_reference = batch.micro_batches[0].reference_logp is not None
    if objective.advantage == "maxent":
        is_prior = has_reference and objective.kl_in == "weights"
        prior = log_likelihoods(batch) if is_prior else None
        rows = torch.tensor([not sequence.zero_advantage for sequence in batch.sequences])
        is_open = batch.in_group_order([rows])
        lengths = [(micro.token_weight > 0).sum(-1).double() for micro in batch.micro_batches]
        tokens = batch.in_group_order(lengths)
        weights, entropy = maxent(groups, objective, tokens, is_open, prior)
        return weights.tolist(), entropy
    penalties = None
    if has_reference and objective.kl_in == "reward":
        penalties = objective.kl_coef * divergences(batch, objective.kl_estimator)
    return torch.cat(group_advantages(groups, objective, penalties)).tolist(), None


def _of_targets(sequence: UsableSequence, computed: float) -> list[float]:
    """A sequence's advantages: one for each target, or one for all."""
    if sequence.zero_advantage:
        return [0.0]
    if not sequence.group.advantages:
        return [computed]
    sent = sequence.group.advantages[sequence.index]
    return sent if len(sent) == 1 else sent[1:]


def _columns(batch: Batch, rows: Iterable[list[float]]) -> list[Tensor]:
    """The rows of each micro-batch. Args: rows: of all of them"""
    left = iter(rows)
    lengths = [micro.lengths for micro in batch.micro_batches]
    return [_column([*islice(left, len(one))], one) for one in lengths]


def _column(rows: Sequence[list[float]], lengths: Sequence[int]) -> Tensor:
    """[B, 1] float32, or [B, T] if a sequence has one for each target. Args: rows, lengths: [B]"""
    if all(len(row) == 1 for row in rows):
        return torch.tensor(rows)
    column = torch.zeros(len(rows), max(lengths))
    for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if row:  # a sequence of one token has no target
            column[place, :length] = torch.tensor(row[:length])
    return column


def group_std(groups: Sequence[Tensor]) -> list[Tensor]:
    """Centre the scores of each group and divide by their standard deviation.

    DeepSeekMath (arXiv 2402.03300), section 4.1.2, outcome supervision. The deviation is the
    population's (divided by n), as in the archived trainer. A group of one sequence, or of equal
    scores, gets zeros, because it has nothing to teach.
    """
    return [_divided(_centred(scores), _centred(scores)) for scores in groups]


def group_mean(groups: Sequence[Tensor]) -> list[Tensor]:
    """Centre the scores of each group: Dr. GRPO (arXiv 2503.20783), section 3.2. Without the
    division, groups of nearly equal scores do not weigh more than others."""
    return [_centred(scores) for scores in groups]


def leave_one_out(groups: Sequence[Tensor]) -> list[Tensor]:
    """The score minus the mean of the group's other scores: RLOO (arXiv 2402.14740).
    This is n / (n - 1) times the centred score. A group of one sequence gets zero."""
    return [_centred(scores) * (len(scores) / max(1, len(scores) - 1)) for scores in groups]


def batch_std(groups: Sequence[Tensor]) -> list[Tensor]:
    """Centre all scores of the batch and divide by their standard deviation: REINFORCE++ (arXiv
    2501.03262), global advantage normalisation. Every completion counts once."""
    whole = _centred(torch.cat(list(groups)))
    return list(torch.split(_divided(whole, whole), [len(scores) for scores in groups]))


NAMED_ADVANTAGES: Mapping[str, Callable[[Sequence[Tensor]], list[Tensor]]] = {
    "group_std": group_std,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "batch_std": batch_std,
}
"""All but `maxent`, which takes the batch."""


def overlong_penalty(length: int, allowed: int, buffer: float) -> float:
    """What a long completion's score loses: 0 up to the buffer, then linearly up to 1.

    DAPO (arXiv 2503.14476), equation 13, soft overlong punishment.

    Args:
        length: tokens of the completion
        allowed: the longest completion that the sampling allowed, in tokens
        buffer: share of `allowed` in which the penalty grows; 0 for no penalty
    """
    grows_over = buffer * allowed
    if not grows_over:
        return 0.0
    return min(1.0, max(0.0, (length - (allowed - grows_over)) / grows_over))


def _centred(scores: Tensor) -> Tensor:
    return scores.double() - scores.double().mean()


def _divided(values: Tensor, centred: Tensor) -> Tensor:
    """Divide by the population's standard deviation of `centred`."""
    return values / centred.square().mean().sqrt().clamp_min(MIN_STD)


# MaxEnt-GRPO: completions are weighted by a soft improvement of the policy, and the loss is their
# weighted negative log-likelihood. The weights maximise the expected log q plus the weights'
# entropy times tau, less the KL divergence from the reference model times beta: arXiv 1805.00909
# (control as inference) and 1806.06920 (MPO).


def improved(utilities: Tensor, temperature: float, epsilon: float) -> Tensor:
    """[n] q: epsilon + (1 - n epsilon) softmax(utilities / temperature). No completion gets less
    than epsilon, so its logarithm is finite. Args: utilities: [n] scores"""
    soft = (utilities.double() / temperature).softmax(0)
    return epsilon + (1 - len(soft) * epsilon) * soft


def completion_weights(
    utilities: Tensor, reference: Tensor, objective: Objective, beta: float
) -> Tensor:
    """[n] softmax((log q + beta reference) / (tau + beta)), float64.

    Args:
        utilities: [n] scores
        reference: [n] log-likelihood of each completion under the reference model, divided by its
            number of tokens if --maxent-length-normalize-ref
    """
    q = improved(utilities, objective.maxent_q_temperature, objective.maxent_q_epsilon)
    return ((q.log() + beta * reference.double()) / (objective.maxent_tau + beta)).softmax(0)


def entropy_of(weights: Tensor) -> float:
    """In nats. Args: weights: [n], they add up to 1"""
    return float(-torch.xlogy(weights, weights).sum())


def group_advantages(
    groups: Sequence[ScoredGroup], objective: Objective, penalties: Tensor | None = None
) -> list[Tensor]:
    """[n] of each group, from its scores; zeros if the environment sent others.

    Args: penalties: [N] what the sequences lose of their scores
    """
    found = [torch.zeros(group.size, dtype=torch.float64) for group in groups]
    open_ones = [i for i, group in enumerate(groups) if not group.advantages]
    scores = [shaped_scores(groups[i], objective.overlong_buffer) for i in open_ones]
    if penalties is not None:
        lost = torch.split(penalties.double(), [group.size for group in groups])
        scores = [kept - lost[i] for kept, i in zip(scores, open_ones, strict=True)]
    if scores:
        rollouts = [rollout_places(groups[i].rollouts) for i in open_ones]
        of_rollouts = [mean_by(*pair) for pair in zip(scores, rollouts, strict=True)]
        name = objective.advantage
        computed = (NAMED_ADVANTAGES.get(name) or own_function(name))(of_rollouts)
        if [len(one) for one in computed] != [len(one) for one in of_rollouts]:
            raise FunctionUnusable(
                f"--advantage {name}: expected as many advantages as each group has scores"
            )
        for i, advantages, places in zip(open_ones, computed, rollouts, strict=True):
            found[i] = advantages[places]
    return found


def maxent(
    groups: Sequence[ScoredGroup],
    objective: Objective,
    tokens: Tensor,
    is_open: Tensor,
    reference: Tensor | None = None,
) -> tuple[Tensor, float | None]:
    """[N] MaxEnt-GRPO's weights of the completions, as advantages; and the mean entropy in nats of
    the weights of a group, None if environments sent the advantages of all groups.

    The advantages are such that the loss of `loss="likelihood"` and `aggregation="sequence"`
    is the mean over the groups of sum_i w_i (-log p(y_i) / L_i). L_i counts the trained tokens of
    all sequences of a rollout. Rollouts without trained tokens, and those whose advantage an
    environment sets to zero, have no share in the weights.

    Args:
        tokens: [N] float64, number of trained tokens of each sequence
        is_open: [N] bool, False where the environment sets the advantage to zero
        reference: [N] log-likelihood of each sequence under the reference model; None: it does not
            count
    """
    beta = 0.0 if reference is None else objective.kl_coef
    likelihoods = torch.zeros_like(tokens) if reference is None else reference.double()
    sizes = [group.size for group in groups]
    columns = (torch.split(column, sizes) for column in (tokens, tokens * is_open, likelihoods))
    found, entropies = [], []
    for group, length, open_length, likelihood in zip(groups, *columns, strict=True):
        rollout = torch.tensor(rollout_places(group.rollouts))
        scores = mean_by(shaped_scores(group, objective.overlong_buffer), rollout.tolist())
        whole = _sum_by(length, rollout).clamp_min(1)
        prior = _sum_by(likelihood, rollout)
        if objective.maxent_length_normalize_ref:
            prior = prior / whole
        is_trained = _sum_by(open_length, rollout) > 0
        weights = torch.zeros_like(whole)
        if is_trained.any():
            weights[is_trained] = completion_weights(
                scores[is_trained], prior[is_trained], objective, beta
            )
        if not group.advantages:
            entropies.append(entropy_of(weights))
        found.append(weights[rollout] * length / whole[rollout])
    advantages = torch.cat(found) * len(tokens) / len(groups)
    return advantages, fmean(entropies) if entropies else None


def rollout_places(rollouts: Sequence[int]) -> list[int]:
    """For each sequence, the place of its rollout among the rollouts of its group."""
    order = {number: place for place, number in enumerate(dict.fromkeys(rollouts))}
    return [order[number] for number in rollouts]


def mean_by(scores: Tensor, places: Sequence[int]) -> Tensor:
    """[n] scores of sequences → the mean score of each rollout, so that a rollout with several
    sequences counts once in the group's mean and deviation."""
    if max(places) + 1 == len(places):
        return scores
    index = torch.tensor(places)
    return _sum_by(scores, index) / index.bincount()


def shaped_scores(group: ScoredGroup, overlong_buffer: float) -> Tensor:
    """[n] the scores, less what overlong completions lose; nothing if no limit is known."""
    allowed = (group.generation_params or {}).get("max_tokens")
    scores = torch.tensor(group.scores, dtype=torch.float64)
    if not overlong_buffer or not isinstance(allowed, int):
        return scores
    lengths = [len(masks) - masks.count(MASKED) for masks in group.masks]
    lost = [overlong_penalty(length, allowed, overlong_buffer) for length in lengths]
    return scores - torch.tensor(lost, dtype=torch.float64)


def _sum_by(values: Tensor, rollout: Tensor) -> Tensor:
    """[rollouts] Args: [sequences] each"""
    sums = torch.zeros(int(rollout.max()) + 1, dtype=values.dtype)
    return sums.index_add_(0, rollout, values)


def log_likelihoods(batch: Batch) -> Tensor:
    """[sequences] sum of the reference model's logprobs over each completion's trained tokens, in
    the order of the groups. Args: batch: with the reference's logprobs"""
    return _over_trained(batch, lambda _, reference: reference)


def divergences(batch: Batch, estimator: KlEstimatorName) -> Tensor:
    """[sequences] KL divergence of each completion from the reference model: the sum over its
    trained tokens, in the order of the groups.

    It is that of the policy that sampled, whose logprobs were logged, as in the reward of RLOO
    (arXiv 2402.14740, section 2).

    Args: batch: with the reference's logprobs
    """
    return _over_trained(batch, partial(kl_terms, estimator=estimator))


def _over_trained(batch: Batch, value: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """[sequences] sums of a value of the behaviour logprobs and the reference's: [B, T] each"""
    sums = []
    for micro in batch.micro_batches:
        assert micro.reference_logp is not None
        values = value(micro.behaviour_logp, micro.reference_logp)
        sums.append(torch.where(micro.token_weight > 0, values, 0.0).sum(-1))
    return batch.in_group_order(sums)


def with_teacher(advantages: Tensor, gaps: Tensor, objective: Objective) -> Tensor:
    """[B, T] reward_coef A + distill_coef (log p_teacher - log p_student).

    With A = 0, their policy gradient is that of the reverse KL divergence from the teacher, on what
    the student samples (arXiv 2306.13649 and 2306.08543).

    Args:
        advantages: [B, 1] or [B, T]
        gaps: [B, T] as of `teacher_gaps`
    """
    return objective.reward_coef * advantages + objective.distill_coef * gaps.nan_to_num(nan=0.0)


def teacher_gaps(sequence: UsableSequence) -> list[float]:
    """[T] log p_teacher - log p_student of each target of a sequence, bounded. NaN where the
    teacher gave no logprob, and where nothing is trained on.

    The student is the policy that sampled the token.
    """
    targets = zip(
        sequence.group.teacher_logprobs(sequence.index)[1:],
        sequence.behaviour_logp[1:],
        sequence.trained[1:],
        strict=True,
    )
    return [
        max(-MAX_LOG_RATIO, min(MAX_LOG_RATIO, teacher - student))
        if teacher is not None and is_trained
        else math.nan
        for teacher, student, is_trained in targets
    ]


def distance(batch: Batch, gaps: Sequence[Tensor]) -> TeacherDistance:
    """Mean over the trained tokens with a teacher. Args: gaps: [B, T] of each micro-batch"""
    pairs = zip(gaps, batch.micro_batches, strict=True)
    trained = torch.cat([gap[micro.token_weight > 0].double() for gap, micro in pairs])
    known = trained[~trained.isnan()]
    reverse_kl = -float(known.mean()) if len(known) else None
    return TeacherDistance(reverse_kl, len(known) / max(1, len(trained)))
