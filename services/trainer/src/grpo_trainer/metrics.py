"""One record per optimizer step, under the names that the field uses."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from grpo_trainer.alignment import Alignment
from grpo_trainer.batch import BatchFacts
from grpo_trainer.loss import LossSums
from grpo_trainer.weight_sync.base import Published


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step. `train_s` includes the optimizer, `step_s` everything."""

    wait_s: float
    train_s: float
    publish_s: float
    step_s: float


def step_record(
    step: int,
    steps: int,
    time_s: float,
    loss: float,
    lr: float,
    sums: LossSums,
    facts: BatchFacts,
    published: Published,
    times: StepTimes,
    alignment: Alignment | None,
) -> dict[str, float]:
    """Flat record of the step with index `step`, counted from 0; "step" in it counts from 1."""
    epoch = published.version.epoch
    staleness = [step - v.step for v in facts.first_versions if v.epoch == epoch]
    record = {
        "step": step + 1,
        "steps": steps,
        "time_s": time_s,
        "reward/mean": facts.reward_mean,
        "reward/zero_variance_fraction": facts.zero_variance_fraction,
        "train/loss": loss,
        "train/grad_norm": published.grad_norm,
        "train/lr": lr,
        "train/truncated_sequences": facts.truncated_sequences,
        "grpo/mean_ratio": sums.mean("ratio"),
        "grpo/clipped_fraction": sums.mean("clipped"),
        "alignment/diff_mean": sums.mean("diff"),
        "alignment/diff_abs_mean": sums.mean("diff_abs"),
        "alignment/diff_max": sums.diff_max,
        "logprobs/training_mean": sums.mean("logp"),
        "logprobs/inference_mean": sums.mean("behaviour_logp"),
        "throughput/tokens_per_s": facts.tokens / times.step_s,
        "time/generate_s": facts.generate_s,
        "time/wait_s": times.wait_s,
        "time/train_s": times.train_s,
        "time/publish_s": times.publish_s,
        "time/step_s": times.step_s,
    }
    if staleness:
        record["staleness/mean"] = sum(staleness) / len(staleness)
        record["staleness/max"] = max(staleness)
    if facts.first_versions:
        # Sampled before this trainer attached: their distance in steps means nothing.
        other = len(facts.first_versions) - len(staleness)
        record["staleness/other_epoch_fraction"] = other / len(facts.first_versions)
    if alignment is not None:
        record["alignment/probe_abs_mean"] = alignment.mean
        record["alignment/probe_max"] = alignment.max
        record["alignment/probe_moved"] = alignment.moved
    return record


def append_record(path: Path, record: dict[str, float]) -> None:
    """Add one JSON line, whole, so that others can follow the file.

    Raises:
        ValueError: a value is NaN or infinite.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record, allow_nan=False) + "\n"
    with path.open("a", encoding="utf-8") as file:
        file.write(line)
