"""What Prometheus reads of a trainer, over HTTP."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from prometheus_client.metrics_core import GaugeMetricFamily

from grpo_core.metrics_port import MetricsNotServed
from grpo_core.tree.trainer_command import CommandLine
from grpo_runs.process.ports import free_port
from grpo_trainer.telemetry.metrics import Stage, StepWatch, step_record
from grpo_trainer.telemetry.prometheus import TrainerMetrics, prometheus_name
from grpo_trainer.telemetry.sinks import open_sinks
from tests.support.scraping import scrape
from tests.unit.trainer.telemetry.test_metrics import OUTCOME


def line(directory: Path, **options: object) -> CommandLine:
    given = {"model": "m", "keep_rollouts": 0, "save_path": directory}
    return CommandLine(**given, **options)


def test_a_scrape_shows_the_newest_step_and_sums_of_all(tmp_path: Path) -> None:
    port, record = free_port(), step_record(OUTCOME, 10)
    with open_sinks(line(tmp_path, metrics_port=port).settings()) as sinks:
        before = scrape(port)
        assert before["grpo_trainer_steps_taken_total"] == 0
        assert before["grpo_trainer_checks_failed_total"] == 0
        assert before["grpo_trainer_disk_free_bytes"] > 0
        assert "grpo_trainer_last_step_timestamp_seconds" not in before
        sinks.enter(Stage.DATA_FETCH)
        sinks.write(record)
        sinks.write(record | {"step": 9, "reward/mean": 0.5})
        sinks.enter(Stage.SYNC)
        shown = scrape(port)
    assert (
        shown.items()
        >= {
            "grpo_trainer_steps_taken_total": 2,
            "grpo_trainer_step": 9,
            "grpo_trainer_steps": 10,
            "grpo_trainer_reward_mean": 0.5,
            "grpo_trainer_reward_part_format": 0.75,
            "grpo_trainer_lag_1_tokens": 4,
            "grpo_trainer_data_unusable_groups_total": 6,
            "grpo_trainer_checks_failed_total": 2,
            "grpo_trainer_stage/sync": 1,
            "grpo_trainer_stage/data_fetch": 0,
        }.items()
    )
    assert shown["process_open_fds"] > 0
    assert {prometheus_name(name) for name in record} <= shown.keys()
    with pytest.raises(OSError, match="refused"):
        scrape(port)


def test_the_last_step_is_dated_from_the_begin_of_the_first(tmp_path: Path) -> None:
    def dated(metrics: TrainerMetrics) -> float:
        name = "grpo_trainer_last_step_timestamp_seconds"
        (family,) = (each for each in metrics.collect() if each.name == name)
        assert isinstance(family, GaugeMetricFamily)
        return family.samples[0].value

    clock = iter([100.0, 130.0])
    metrics = TrainerMetrics(tmp_path, lambda: next(clock))
    watch = StepWatch(enter=metrics.enter)
    watch.begin()
    assert dated(metrics) == 100
    watch.fetched()
    watch.updated()
    metrics.write({"step": 1})
    watch.begin()
    assert dated(metrics) == 130


def test_a_port_in_use_is_named_with_its_option(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        own = line(tmp_path, metrics_port=taken.getsockname()[1])
        assert [mistake.field for mistake in own.start_mistakes()] == ["metrics_port"]
        options = "--metrics-port or --metrics-host"
        with pytest.raises(MetricsNotServed, match=options), open_sinks(own.settings()):
            pass
