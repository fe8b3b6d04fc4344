"""Environments on unmodified atroposlib 0.4.0 feed our trainer through our servers.

Two at once, with groups of different sizes, and minimums that leave a quarter of every batch to
the faster one.
"""

from __future__ import annotations

import re

import pytest

from tests.compat.training_run import SHARES, STEPS, TrainingRun

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]  # the first use installs atroposlib

NOISE_NATS = 1e-4
"""float32 rounding between vLLM's kernels and torch's; seen: 2e-6."""

STALE_NATS = 0.5
"""Mean of data that is some steps old; seen: 0.1. Shifted by one token it is over 1.2."""


def test_every_process_ends_by_itself_and_leaves_none(training_run: TrainingRun) -> None:
    assert training_run.trainer_exit == 0
    assert training_run.environment_exits == [0] * len(SHARES)
    assert [record["step"] for record in training_run.records] == list(range(1, STEPS + 1))
    assert training_run.left_processes == []


def test_what_the_environments_send_lines_up_with_what_is_trained(
    training_run: TrainingRun,
) -> None:
    """The first batch was sampled by the very weights that are trained on it."""
    first, *later = training_run.records
    assert first["alignment/diff_max"] < NOISE_NATS
    assert first["grpo/mean_ratio"] == pytest.approx(1.0, abs=NOISE_NATS)
    assert max(record["alignment/diff_abs_mean"] for record in later) < STALE_NATS


def test_the_server_serves_every_update(training_run: TrainingRun) -> None:
    assert max(record["alignment/probe_max"] for record in training_run.records) < NOISE_NATS
    assert min(record["alignment/probe_moved"] for record in training_run.records) > 10 * NOISE_NATS


def test_rewards_arrive(training_run: TrainingRun) -> None:
    """atroposlib drops groups whose scores are all equal, so every batch has both kinds."""
    for record in training_run.records:
        assert 0.0 < record["reward/mean"] < 1.0
        assert record["reward/zero_variance_fraction"] == 0.0


def test_every_environment_has_its_part(training_run: TrainingRun) -> None:
    for share, log in zip(SHARES, training_run.environment_logs, strict=True):
        assert log.count('{"status":"received"}') >= share.least_groups * STEPS


def test_the_environments_meet_no_error(training_run: TrainingRun) -> None:
    for log in training_run.environment_logs:
        assert log.count("env_manager: Status dict") >= STEPS
        assert re.findall(r"^[\d.]+ (?:ERROR|CRITICAL) .*", log, re.MULTILINE) == []
