"""The record of a step, for a result whose numbers can be checked by hand."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from grpo_core.tree.objectives import GRPO
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.checks.served_weights import Alignment
from grpo_trainer.data.collate import Batch, TeacherDistance
from grpo_trainer.learner import GradientStats
from grpo_trainer.losses import NO_SUMS
from grpo_trainer.telemetry.metrics import StepOutcome, StepWatch, step_record
from grpo_trainer.telemetry.speed import ModelFlops, Speed
from grpo_trainer.token_table import Distance, TokenTable
from grpo_trainer.weight_sync.base import Incidents, Published, Reach
from tests.unit.trainer.groups import collated, group, usable

SUMS = replace(
    NO_SUMS,
    **{"tokens": 4, "ratio": 4.4, "ratio_square": 5.0, "ratio_max": 1.4, "clipped": 1},
    **{"corrected": 2, "entropy": 6.0, "reference_kl": 0.8},
    **{"logp": -4.0, "logp_square": 7.0, "behaviour_logp": -6.0, "behaviour_logp_square": 12.0},
    **{"diff": 2.0, "diff_abs": 2.4, "diff_max": 1.1, "kl_k3": 0.4},
    **{"positive_tokens": 1, "positive_logp": -0.5, "negative_tokens": 2, "negative_logp": -3.0},
)
DATA: dict[str, float | None] = {
    **{"reward/mean": 0.25, "reward/part/format": 0.75, "reward/std_in_group": 0.5},
    **{"reward/zero_variance_fraction": 0.1, "rollout/generation_time": 0.3},
    **{"rollout/completion_tokens_mean": 12.5, "data/truncated_fraction": 0.2},
    "checks/receipt_fraction": 0.9,
}


def table(diff: list[float]) -> TokenTable:
    zeros = torch.zeros(len(diff))
    columns = zeros + 2, zeros, zeros, zeros + 1, zeros.long(), zeros.long()
    return TokenTable(torch.tensor(diff), *columns)


DIFFERENCES = [0.1, -1.1, 0.4, 0.8]
RATIOS = [math.exp(difference) for difference in DIFFERENCES]
K3 = sum(math.exp(d) - 1 - d for d in DIFFERENCES) / 4
V = PolicyVersion


def batch_of(versions: Sequence[V], bounds: Sequence[V] = ()) -> Batch:
    """With a reference model, weights of MaxEnt-GRPO, and a teacher. Each completion is a group.

    Args: versions, bounds: of the completions
    """
    (micro,) = collated(group()).micro_batches
    one = replace(usable(group())[0], versions=None, received_under=None)
    sequences = [
        *(replace(one, versions=(version, version)) for version in versions),
        *(replace(one, received_under=bound) for bound in bounds),
    ]
    return Batch(
        [replace(micro, reference_logp=micro.behaviour_logp)],
        sequences or [one],
        tokens=100,
        metrics=DATA,
        dropped=Counter(unusable=3, repeated=1, stale=2),
        weights_entropy=0.7,
        teacher=TeacherDistance(0.3, 0.9),
    )


OUTCOME = StepOutcome(
    trained=PolicyVersion(3, 7),
    lr=1e-4,
    objective=replace(GRPO, kl_coef=0.05, maxent_tau=0.2),
    batch=batch_of([V(3, 6)]),
    quarantined_batches=0,
    failed_checks=1,
    gradients=GradientStats((0.25, 0.75, -0.5), SUMS, table(DIFFERENCES), norm=1.5),
    fresh=Distance(tokens=2, mean=0.01, max=0.02, lower_bound=0.0),
    published=Published(
        PolicyVersion(3, 8),
        0.2,
        alignment=Alignment(1e-6, 2e-6, moved=0.01, previous=0.01, sampled_mean=3e-6),
        reach=Reach(2, 7, first_s=0.2, all_s=0.3, incidents=Incidents(3, 4, 5, 6)),
    ),
    speed=Speed(ModelFlops(of_token=30e12, of_target=10e12, of_view=3e12), 400e12, ranks=2),
    times={
        "time_s": 9.0,
        "train/step_time": 2.0,
        "train/data_fetch_time": 0.5,
        "train/compute_time": 1.0,
        "train/sync_time": 0.2,
    },
    save_s=0.25,
)


def test_every_value_by_hand() -> None:
    assert step_record(OUTCOME, 10) == pytest.approx(
        {
            **{"step": 8, "steps": 10, "time_s": 9.0},
            **DATA,
            **{"maxent/tau": 0.2, "maxent/weights_entropy": 0.7},
            **{"distill/reverse_kl": 0.3, "distill/scored_fraction": 0.9},
            **{"data/unusable_groups": 3, "data/repeated_groups": 1, "data/stale_groups": 2},
            "data/quarantined_batches": 0,
            **{"checks/failed": 1},
            **{"train/loss_policy": 0.25, "train/loss_kl": 0.75, "train/loss_entropy": -0.5},
            **{"train/loss": 0.5, "train/grad_norm": 1.5, "train/lr": 1e-4},
            **{"train/pos_logp": -0.5, "train/neg_logp": -1.5},
            **{"train/step_time": 2.0, "train/data_fetch_time": 0.5},
            **{"train/compute_time": 1.0, "train/sync_time": 0.2, "train/save_time": 0.25},
            **{"throughput/tokens_per_s": 50, "train/tokens_per_s": 100},
            # 2 inputs, and 2 after those 2; 4 targets; 1 + 2 and 3 + 4 views.
            **{"train/mfu": (4 * 30 + 4 * 10 + 10 * 3) / 400, "train/device_tflops": 400},
            "train/rank_idle_fraction": 0.5,
            **{"grpo/mean_ratio": 1.1, "grpo/ratio_max": 1.4, "grpo/clipped_fraction": 0.25},
            **{"grpo/effective_sample_fraction": 4.4**2 / 20, "grpo/corrected_fraction": 0.5},
            **{"policy/entropy": 1.5, "policy/reference_kl": 0.2, "policy/kl_coef": 0.05},
            **{"logprobs/training_mean": -1.0, "logprobs/training_std": 1.0},
            **{"logprobs/inference_mean": -1.5, "logprobs/inference_std": 1.0},
            **{"alignment/diff_mean": 0.5, "alignment/diff_abs_mean": 0.6},
            **{"alignment/kl_k1": -0.5},
            **{"alignment/diff_abs_p99": 1.1, "alignment/diff_max": 1.1, "alignment/kl_k3": 0.1},
            **{"alignment/fresh_fraction": 0.5, "alignment/fresh_diff_abs_mean": 0.01},
            **{"alignment/probe_abs_mean": 1e-6, "alignment/probe_max": 2e-6},
            **{"alignment/probe_moved": 0.01, "alignment/sampled_abs_mean": 3e-6},
            **{"publication/servers": 2, "publication/bytes": 7},
            **{"publication/first_serves_time": 0.2, "publication/all_serve_time": 0.3},
            **{"publication/servers_left": 3, "publication/repeated_announcements": 4},
            **{"publication/unanswered_checks": 5, "publication/by_files": 6},
            **{"staleness/mean": 1, "staleness/max": 1, "staleness/other_epoch_fraction": 0},
            **{"staleness/bound_fraction": 0},
            **{"lag_1/tokens": 4, "lag_1/kl_k1": -0.05, "lag_1/kl_k3": K3, "lag_1/entropy": 2.0},
            **{"lag_1/diff_abs_mean": 0.6, "lag_1/diff_abs_p99": 1.1, "lag_1/diff_abs_max": 1.1},
            **{"lag_1/mean_ratio": sum(RATIOS) / 4},
            **{
                "lag_1/effective_sample_fraction": sum(RATIOS) ** 2 / sum(r * r for r in RATIOS) / 4
            },
        }
    )


def test_every_metric_is_documented() -> None:
    page = (Path(__file__).parents[4] / "docs/reference/metrics.md").read_text()
    section = page.split("\n## ")[1]
    listed = re.findall(r"(?m)^\| `([a-z0-9_/]+)` \|", section)
    assert sorted(listed) == sorted(step_record(OUTCOME, 10))


def test_times_of_a_step() -> None:
    """The first step begins at 2. The second one begins at 10, has its batch at 11 and its new
    weights at 14.5, and ends at 20."""
    ticks = iter([2.0, 10.0, 11.0, 14.5, 20.0])
    watch = StepWatch(clock=lambda: next(ticks))
    watch.begin()
    watch.begin()
    watch.fetched()
    watch.updated()
    assert watch.times(0.25) == {
        "time_s": 18.0,
        "train/step_time": 10.0,
        "train/data_fetch_time": 1.0,
        "train/compute_time": 3.5,
        "train/sync_time": 0.25,
    }


@pytest.mark.parametrize(
    ("versions", "bounds", "expected"),
    [
        # Steps of an earlier trainer's versions cannot be compared.
        ([V(3, 7), V(3, 4), V(2, 7), V(1, 90)], [], (1.5, 3, 0.5, 0.0)),
        # A bound counts like a version.
        ([V(3, 6)], [V(3, 4), V(3, 4)], (7 / 3, 3, 0.0, 2 / 3)),
        ([], [V(3, 4)], (3, 3, 0.0, 1.0)),
        ([], [], (None, None, None, None)),
    ],
)
def test_staleness_at_step_7_of_epoch_3(
    versions: list[V], bounds: list[V], expected: tuple[float | None, ...]
) -> None:
    found = step_record(replace(OUTCOME, batch=batch_of(versions, bounds)), 10)
    names = ("mean", "max", "other_epoch_fraction", "bound_fraction")
    assert [found.get(f"staleness/{name}") for name in names] == pytest.approx(expected)
    assert ("alignment/fresh_fraction" in found) == bool(versions)  # a bound is never fresh


def test_undefined_values_are_absent_not_zero() -> None:
    nothing = replace(
        OUTCOME,
        batch=replace(batch_of([]), metrics=DATA | {"rollout/generation_time": None}),
        gradients=GradientStats((0.0, 0.0, 0.0), NO_SUMS, table([]), norm=1.5),
        fresh=Distance(0, 0.0, 0.0, 0.0),
        published=Published(PolicyVersion(3, 8), 0.0),
        save_s=None,
    )
    names = set(step_record(nothing, 10))
    assert not {name for name in names if name.startswith(("grpo/", "alignment/", "logprobs/"))}
    assert not names & {"train/pos_logp", "train/neg_logp", "train/save_time"}
    assert "rollout/generation_time" not in names
    assert {"train/loss", "train/grad_norm", "reward/mean", "data/unusable_groups"} <= names
