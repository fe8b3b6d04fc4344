"""Builds the record of one optimizer step, with the metric names that are common in the field.

Metrics of tokens are also given by lag: how many steps older the weights are that sampled them. An
old policy moves every one of these metrics, so only tokens of one lag can be compared from step to
step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean

import torch

from grpo_core.tree.objectives import Objective
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.data.collate import Batch
from grpo_trainer.learner import GradientStats
from grpo_trainer.losses import MAX_LOG_RATIO
from grpo_trainer.telemetry.speed import Speed
from grpo_trainer.token_table import Distance, TokenTable
from grpo_trainer.weight_sync.base import Published

Record = dict[str, float]

DROPPED = ("unusable", "repeated", "stale")
OLDEST_LAG = 4
"""Larger lags are counted together."""


class Stage(StrEnum):
    """Parts of a step, each with a time of its own in the record: `train/data_fetch_time` and so
    on."""

    DATA_FETCH = "data_fetch"
    COMPUTE = "compute"
    SYNC = "sync"
    SAVE = "save"


class StepWatch:
    """Measures the times of a run's steps. Args: enter: called at the begin of each stage"""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        enter: Callable[[Stage], None] = lambda _: None,
    ) -> None:
        self._clock = clock
        self._enter = enter
        self._started: float | None = None

    def begin(self) -> None:
        """A step begins."""
        self._begin = self._clock()
        self._started = self._begin if self._started is None else self._started
        self._enter(Stage.DATA_FETCH)

    def fetched(self) -> None:
        """The batch has arrived."""
        self._fetched = self._clock()
        self._enter(Stage.COMPUTE)

    def updated(self) -> None:
        """The optimizer step is taken."""
        self._updated = self._clock()
        self._enter(Stage.SYNC)

    def times(self, publish_s: float) -> Record:
        """End the step; returns its times in seconds. Step time includes everything. "time_s"
        counts from the first step of this process."""
        assert self._started is not None, "call begin() first"
        end = self._clock()
        self._enter(Stage.SAVE)
        return {
            "time_s": end - self._started,
            "train/step_time": end - self._begin,
            "train/data_fetch_time": self._fetched - self._begin,
            "train/compute_time": self._updated - self._fetched,
            "train/sync_time": publish_s,
        }


@dataclass(frozen=True)
class StepOutcome:
    """The results of a step.

    Args:
        trained: version of the weights that computed the gradients; its step counts from 0
        fresh: the logprob difference over fresh tokens
        objective: with this step's coefficients
        quarantined_batches: number of batches quarantined since the previous step
        failed_checks: number of findings of this step
        save_s: seconds of saving since the previous step, None if nothing was saved
    """

    trained: PolicyVersion
    lr: float
    objective: Objective
    batch: Batch
    quarantined_batches: int
    failed_checks: int
    gradients: GradientStats
    fresh: Distance
    published: Published
    speed: Speed
    times: Record
    save_s: float | None


def step_record(outcome: StepOutcome, steps: int) -> Record:
    """The step's flat record. "step" in it counts from 1. Metrics that this step does not have are
    missing."""
    defined_or_not = {
        "step": outcome.trained.step + 1,
        "steps": steps,
        "time_s": outcome.times["time_s"],
        **outcome.batch.metrics,
        **{f"data/{name}_groups": outcome.batch.dropped[name] for name in DROPPED},
        "data/quarantined_batches": outcome.quarantined_batches,
        "checks/failed": outcome.failed_checks,
        **_training(outcome),
        **_policy(outcome),
        **_objective(outcome),
        **_alignment(outcome),
        **_publication(outcome),
        **_staleness(outcome),
        **dict(_by_lag(outcome)),
    }
    return {name: value for name, value in defined_or_not.items() if value is not None}


def _training(outcome: StepOutcome) -> dict[str, float | None]:
    sums, (policy, kl, entropy) = outcome.gradients.sums, outcome.gradients.loss_parts
    return {
        "train/loss": outcome.gradients.loss,
        "train/loss_policy": policy,
        "train/loss_kl": kl,
        "train/loss_entropy": entropy,
        "train/grad_norm": outcome.gradients.norm,
        "train/lr": outcome.lr,
        "train/pos_logp": _mean(sums.positive_logp, sums.positive_tokens),
        "train/neg_logp": _mean(sums.negative_logp, sums.negative_tokens),
        **outcome.times,
        **outcome.speed.metrics(outcome.batch, outcome.times["train/compute_time"]),
        "train/save_time": outcome.save_s,
        "throughput/tokens_per_s": outcome.batch.tokens / outcome.times["train/step_time"],
    }


def _policy(outcome: StepOutcome) -> dict[str, float | None]:
    sums = outcome.gradients.sums
    has_reference = outcome.batch.micro_batches[0].reference_logp is not None
    entropy = sums.mean("entropy")
    return {
        "grpo/mean_ratio": sums.mean("ratio"),
        "grpo/ratio_max": sums.ratio_max if sums.tokens else None,
        "grpo/clipped_fraction": sums.mean("clipped"),
        "grpo/corrected_fraction": sums.mean("corrected"),
        "grpo/effective_sample_fraction": sums.effective_sample_fraction,
        "policy/reference_kl": sums.mean("reference_kl") if has_reference else None,
        "policy/kl_coef": outcome.objective.kl_coef if has_reference else None,
        # NaN if it was not computed.
        "policy/entropy": None if entropy is None or math.isnan(entropy) else entropy,
        "logprobs/training_mean": sums.mean("logp"),
        "logprobs/training_std": sums.std("logp"),
        "logprobs/inference_mean": sums.mean("behaviour_logp"),
        "logprobs/inference_std": sums.std("behaviour_logp"),
    }


def _objective(outcome: StepOutcome) -> dict[str, float | None]:
    """Of MaxEnt-GRPO and of distillation."""
    entropy, teacher = outcome.batch.weights_entropy, outcome.batch.teacher
    return {
        "maxent/tau": None if entropy is None else outcome.objective.maxent_tau,
        "maxent/weights_entropy": entropy,
        "distill/reverse_kl": None if teacher is None else teacher.reverse_kl,
        "distill/scored_fraction": None if teacher is None else teacher.scored,
    }


def _alignment(outcome: StepOutcome) -> dict[str, float | None]:
    sums, fresh = outcome.gradients.sums, outcome.fresh
    probe, diff = outcome.published.alignment, sums.mean("diff")
    has_versions = any(sequence.versions for sequence in outcome.batch.sequences)
    found: dict[str, float | None] = {
        "alignment/diff_mean": diff,
        "alignment/diff_abs_mean": sums.mean("diff_abs"),
        "alignment/diff_abs_p99": outcome.gradients.tokens.diff_abs_quantile(0.99),
        "alignment/diff_max": sums.diff_max if sums.tokens else None,
        "alignment/kl_k1": None if diff is None else -diff,
        "alignment/kl_k3": sums.mean("kl_k3"),
        "alignment/fresh_fraction": _mean(fresh.tokens, sums.tokens) if has_versions else None,
        "alignment/fresh_diff_abs_mean": fresh.mean if fresh.tokens else None,
    }
    if probe is not None:
        found["alignment/probe_abs_mean"] = probe.mean
        found["alignment/probe_max"] = probe.max
        found["alignment/probe_moved"] = probe.moved
        found["alignment/sampled_abs_mean"] = probe.sampled_mean
    return found


def _publication(outcome: StepOutcome) -> dict[str, float | None]:
    reach = outcome.published.reach
    if reach is None:
        return {}
    return {
        "publication/servers": reach.servers,
        "publication/bytes": reach.bytes,
        "publication/first_serves_time": reach.first_s,
        "publication/all_serve_time": reach.all_s,
        "publication/servers_left": reach.incidents.left,
        "publication/repeated_announcements": reach.incidents.repeated,
        "publication/unanswered_checks": reach.incidents.unanswered,
        "publication/by_files": reach.incidents.by_files,
    }


def _by_lag(outcome: StepOutcome) -> Iterator[tuple[str, float]]:
    """Name and value of each metric; those of tokens of an unknown version are missing."""
    table, trainer = outcome.gradients.tokens, outcome.trained
    lags = torch.tensor([_lag(s.version, trainer) for s in outcome.batch.sequences])
    lags = lags[table.sequence]  # [N]
    for lag in sorted(set(lags.tolist()) - {-1}):
        prefix = f"lag_{lag}{'_or_more' if lag == OLDEST_LAG else ''}"
        for name, value in _metrics_of(table.where(lags == lag)):
            yield f"{prefix}/{name}", value


def _lag(version: PolicyVersion | None, trainer: PolicyVersion) -> int:
    """-1 if it is unknown."""
    if version is None or version.epoch != trainer.epoch:
        return -1
    return max(0, min(OLDEST_LAG, trainer.step - version.step))


def _metrics_of(table: TokenTable) -> Iterator[tuple[str, float]]:
    """Args: table: not empty"""
    distance = table.diff.abs().double()
    diff = table.diff.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = diff.exp()
    yield "tokens", len(table)
    yield "kl_k1", -float(diff.mean())
    yield "kl_k3", float((ratio - 1 - diff).mean())
    yield "diff_abs_mean", float(distance.mean())
    yield "diff_abs_p99", table.diff_abs_quantile(0.99) or 0.0
    yield "diff_abs_max", float(distance.max())
    yield "mean_ratio", float(ratio.mean())
    yield "effective_sample_fraction", float(ratio.mean().square() / ratio.square().mean())
    if not bool(table.entropy.isnan().any()):
        yield "entropy", float(table.entropy.mean())


def _staleness(outcome: StepOutcome) -> dict[str, float | None]:
    """Staleness in steps, within the epoch: steps of other epochs cannot be compared. The version
    of a group's arrival counts like its own: the completion is at least as old."""
    sequences = outcome.batch.sequences
    versions = [version for s in sequences if (version := s.begun_by) is not None]
    bounds = [s.begun_by is not None and not s.versions for s in sequences if s.index == 0]
    epoch = outcome.published.version.epoch
    steps = [outcome.trained.step - version.step for version in versions if version.epoch == epoch]
    found: dict[str, float | None] = {}
    if steps:
        found["staleness/mean"] = sum(steps) / len(steps)
        found["staleness/max"] = max(steps)
    if versions:
        found["staleness/other_epoch_fraction"] = 1 - len(steps) / len(versions)
        found["staleness/bound_fraction"] = fmean(bounds)
    return found


def _mean(total: float, count: float) -> float | None:
    return total / count if count else None
