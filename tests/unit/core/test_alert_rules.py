"""Prometheus' rules made of the alerts: promtool evaluates each of them on worked numbers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_core.alerts import ALERTS

ROOT = Path(__file__).parents[3]
RULES = ROOT / "helm/grpo/files/alerts.yml"
RUNS = {"run_api_step": "5x200", "run_api_num_steps": "10x200"}
"""A run that has not ended. `5x200`: 5, and 200 further samples of the same value."""

CASES: dict[str, tuple[dict[str, str], str, str]] = {
    # The last step ended at minute 2, after ten minutes; its trainer is gone from minute 10 on.
    "no-training-step": (
        RUNS
        | {
            "grpo_trainer_last_step_timestamp_seconds": "120x10 _x190",
            "grpo_trainer_train_step_time": "600x2 60x8 _x190",
        },
        "27m",
        "27m30s",
    ),
    "run-api-gone": (RUNS | {"run_api_redis_up": "1x9 stale"}, "10m30s", "12m"),
    "queue-stuck": (
        RUNS | {"run_api_oldest_queued_group_age_seconds": "0+60x200"},
        "30m",
        "31m",
    ),
    "no-checkpoint": ({"run_api_oldest_lease_age_seconds": "0+60x200"}, "120m", "121m"),
    "groups-dropped": (RUNS | {"grpo_environment_dropped_share": "0.9x9 0.91x190"}, "9m", "10m"),
    "staleness-high": ({"grpo_trainer_staleness_mean": "1x9 4.5x190"}, "14m", "15m"),
    "no-environment": (RUNS | {"run_api_environments_alive": "1x9 0x190"}, "11m", "12m"),
    "server-gone": (
        RUNS | {"run_api_servers": "3x9 2x190", "run_api_servers_lost": "0x9 1x190"},
        "10m",
        "11m",
    ),
    "engine-crashed": ({'run_api_server_crashes_total{server="a"}': "1x9 2x190"}, "9m", "11m"),
    "groups-refused": ({"run_api_refused_groups_total": "0x9 1x190"}, "9m", "11m"),
    "groups-unusable": ({"grpo_trainer_data_unusable_groups_total": "0x9 1x190"}, "9m", "11m"),
    "groups-stale": ({"grpo_trainer_data_stale_groups_total": "0+0.9x9 9+9x190"}, "9m", "12m"),
    "batch-quarantined": (
        {"grpo_trainer_data_quarantined_batches_total": "0x9 1x190"},
        "9m",
        "11m",
    ),
    "check-failed": ({"grpo_trainer_checks_failed_total": "0x9 1x190"}, "9m", "11m"),
    "redis-gone": ({"run_api_redis_up": "1x9 0x190"}, "10m", "11m"),
    "redis-disk": (
        {
            "run_api_redis_append_only_file_bytes": "75x9 76x190",
            "run_api_redis_disk_bytes": "100x200",
        },
        "9m",
        "10m",
    ),
    "disk-low": ({"grpo_trainer_disk_free_bytes": "2e9x9 1.9e9x190"}, "10m", "11m"),
}
"""Series by name, a sample for each minute; a time at which the alert is quiet; one at which it
fires."""
API = RUNS | {
    "run_api_redis_up": "1x200",
    "run_api_oldest_queued_group_age_seconds": "0x200",
    "run_api_environments_alive": "1x200",
    "run_api_servers": "2x200",
    "run_api_servers_lost": "0x200",
    'run_api_server_crashes_total{server="a"}': "3x200",
    'run_api_server_crashes_total{server="b"}': "3x9 stale _x5 3x180",  # it left, and is back
}
IDLE = API | {
    "run_api_oldest_queued_group_age_seconds": "9999x200",
    "run_api_environments_alive": "0x200",
    "run_api_servers": "2x30 1x170",
    "run_api_servers_lost": "0x30 1x170",
}
TRAINER = {
    "grpo_trainer_last_step_timestamp_seconds": "0+60x200",
    "grpo_trainer_steps_taken_total": "0+1x200",
    "grpo_trainer_train_step_time": "60x200",
}
WAITS = TRAINER | {"grpo_trainer_last_step_timestamp_seconds": "60x200"}
NO_TRAINER = {"run_api_step": "0x200", "run_api_num_steps": "0x200"}
NO_LAST_STEP = {"run_api_num_steps": "0x200"}
ENDED = {"run_api_step": "10x200"}


def gone(series: dict[str, str]) -> dict[str, str]:
    """Scrapes fail from minute 10 on."""
    return {name: values.split("x")[0] + "x9 stale" for name, values in series.items()}


STANDS_STILL = {"no-training-step", "queue-stuck", "no-environment", "server-gone"}
SITUATIONS: dict[str, tuple[dict[str, str], set[str]]] = {
    "healthy": (API | TRAINER, set()),
    "healthy, with steps of 25 minutes": (
        API
        | TRAINER
        | {
            "grpo_trainer_last_step_timestamp_seconds": "1200x200",
            "grpo_trainer_train_step_time": "1500x200",
        },
        set(),
    ),
    "in its first step": (
        API
        | {
            "grpo_trainer_last_step_timestamp_seconds": "0x200",
            "grpo_trainer_steps_taken_total": "0x200",
        },
        set(),
    ),
    "one of two servers was stopped": (API | TRAINER | {"run_api_servers": "2x30 1x170"}, set()),
    "one was lost and started again under another name": (
        API | TRAINER | {"run_api_servers_lost": "0x30 1x170"},
        set(),
    ),
    "healthy, without a last step": (API | TRAINER | NO_LAST_STEP, set()),
    "stands still": (IDLE | WAITS, STANDS_STILL),
    "stands still, without a last step": (IDLE | WAITS | NO_LAST_STEP, STANDS_STILL),
    "run-api is gone": (gone(API) | WAITS, {"run-api-gone", "no-training-step"}),
    "run-api and the trainer are gone": (
        gone(API | TRAINER),
        {"run-api-gone", "no-training-step"},
    ),
    "Redis is gone": (
        gone(API) | WAITS | {"run_api_redis_up": "1x9 0x190"},
        {"redis-gone", "no-training-step"},
    ),
    "the trainer is gone": (API | gone(TRAINER), {"no-training-step"}),
    "the trainer of a resumed run starts": (
        API | gone(TRAINER) | {"grpo_trainer_steps_taken_total": "0x200"},
        set(),
    ),
    "no trainer yet, after a run of the same name": (IDLE | gone(TRAINER) | NO_TRAINER, set()),
    "stands still, after a longer run of the same name": (
        IDLE
        | WAITS
        | {
            'run_api_step{instance="old"}': "20x9 stale",
            'run_api_num_steps{instance="old"}': "20x9 stale",
        },
        STANDS_STILL,
    ),
    "has ended": (IDLE | WAITS | ENDED, set()),
    "has ended, and is taken down": (gone(IDLE | WAITS | ENDED), set()),
}
"""Series by name as above, and the alerts that fire at minute 40."""


def promtool(*words: str) -> str:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool on PATH: see .ci/run")
    done = subprocess.run([program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def with_run(series: str) -> str:
    """`a` → `a{run="r"}`, `a{b="c"}` → `a{run="r",b="c"}`"""
    name, _, labels = series.partition("{")
    return f'{name}{{run="r",{labels}' if labels else f'{name}{{run="r"}}'


def case(series: dict[str, str], tests: list[dict[str, Any]]) -> dict[str, Any]:
    given = [{"series": with_run(name), "values": values} for name, values in series.items()]
    return {"interval": "1m", "input_series": given, "alert_rule_test": tests}


def expected(name: str, at: str, fires: bool) -> dict[str, Any]:
    (alert,) = (each for each in ALERTS if each.name == name)
    labels = {"run": "r", "severity": alert.severity.value}
    notes = {"summary": alert.meaning, "description": alert.advice}
    firing = [{"exp_labels": labels, "exp_annotations": notes}] if fires else []
    return {"eval_time": at, "alertname": f"grpo-{name}", "exp_alerts": firing}


def test_each_rule_fires_when_its_condition_has_held_and_only_then(tmp_path: Path) -> None:
    assert set(CASES) == {alert.name for alert in ALERTS}
    tests = [
        case(series, [expected(name, quiet, False), expected(name, fires, True)])
        for name, (series, quiet, fires) in CASES.items()
    ]
    tests += [
        case(series, [expected(alert.name, "40m", alert.name in firing) for alert in ALERTS])
        | {"name": name}
        for name, (series, firing) in SITUATIONS.items()
    ]
    file = tmp_path / "tests.yml"
    content = {"rule_files": [str(RULES)], "evaluation_interval": "30s", "tests": tests}
    file.write_text(yaml.safe_dump(content))
    assert "SUCCESS" in promtool("test", "rules", str(file))
