"""The dashboard is one of Grafana's, its queries are PromQL, and every metric that it or an alert
names is one that a service exports."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from docs.generate.dashboard import OF_RUN
from grpo_core.alerts import ALERTS
from grpo_trainer.telemetry.metrics import step_record
from grpo_trainer.telemetry.prometheus import prometheus_name
from tests.unit.core.test_alert_rules import ROOT, promtool
from tests.unit.trainer.telemetry.test_metrics import OUTCOME

DASHBOARD = json.loads((ROOT / "docs/assets/grafana-dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
NAMES = re.compile(r"\b(?:run_api|grpo_\w+?|vllm|process)[_:]\w+")


def exported() -> set[str]:
    page = (ROOT / "docs/reference/metrics.md").read_text()
    of_record = map(prometheus_name, step_record(OUTCOME, 10))
    return {*re.findall(r"(?m)^\| `(\w+)` \|", page), *of_record, "process_resident_memory_bytes"}


def of_vllm() -> str:
    """Read, not imported, which takes seconds."""
    vllm = find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    return (Path(vllm.origin).parent / "v1/metrics/loggers.py").read_text()


def test_every_metric_that_is_asked_for_exists() -> None:
    asked = {
        name
        for query in (*QUERIES, *(alert.expression for alert in ALERTS))
        for name in NAMES.findall(query)
        if not name.endswith("_part_")
    }
    assert {"grpo_trainer_reward_mean", "vllm:kv_cache_usage_perc"} < asked
    own = {name for name in asked if not name.startswith("vllm:")}
    assert own <= exported()
    known = of_vllm()
    assert [n for n in asked - own if f'"{n.removesuffix("_total")}"' not in known] == []


def test_the_dashboard_has_the_form_that_grafana_describes() -> None:
    """Read by Grafana's own package, and written again, it is the same."""
    again = json.loads(JSONEncoder().encode(Dashboard.from_json(DASHBOARD)))
    assert again == DASHBOARD
    places = {(at["x"], at["y"]) for at in (panel["gridPos"] for panel in DASHBOARD["panels"])}
    assert len(places) == len(DASHBOARD["panels"])
    assert all(OF_RUN in query for query in QUERIES)


def test_every_query_is_promql(tmp_path: Path) -> None:
    every = [
        {"record": "a", "expr": query, "labels": {"n": str(n)}} for n, query in enumerate(QUERIES)
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": every}]}))
    assert f"SUCCESS: {len(QUERIES)} rules found" in promtool("check", "rules", str(file))
