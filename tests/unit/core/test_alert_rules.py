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
    # The last step ended at minute 2; its trainer is gone from minute 10 on.
    "no-training-step": (
        RUNS | {"grpo_trainer_last_step_timestamp_seconds": "120x10 _x190"},
        "17m",
        "17m30s",
    ),
    "queue-stuck": (
        RUNS | {"run_api_oldest_queued_group_age_seconds": "0+60x200"},
        "30m",
        "31m",
    ),
    "no-checkpoint": ({"run_api_oldest_lease_age_seconds": "0+60x200"}, "120m", "121m"),
    "staleness-high": ({"grpo_trainer_staleness_mean": "1x9 4.5x190"}, "14m", "15m"),
    "no-environment": (RUNS | {"run_api_environments_alive": "1x9 0x190"}, "11m", "12m"),
    "server-gone": (RUNS | {"run_api_servers": "3x9 2x190"}, "10m", "11m"),
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
ENDED = RUNS | {
    "run_api_step": "10x200",
    "grpo_trainer_last_step_timestamp_seconds": "0x200",
    "run_api_oldest_queued_group_age_seconds": "9999x200",
    "run_api_environments_alive": "0x200",
    "run_api_servers": "1x9 0x190",
}


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


def test_each_rule_fires_when_its_condition_has_held(tmp_path: Path) -> None:
    assert set(CASES) == {alert.name for alert in ALERTS}
    tests = [
        case(series, [expected(name, quiet, False), expected(name, fires, True)])
        for name, (series, quiet, fires) in CASES.items()
    ]
    tests.append(case(ENDED, [expected(alert.name, "180m", False) for alert in ALERTS]))
    file = tmp_path / "tests.yml"
    content = {"rule_files": [str(RULES)], "evaluation_interval": "30s", "tests": tests}
    file.write_text(yaml.safe_dump(content))
    assert "SUCCESS" in promtool("test", "rules", str(file))
