"""The alerts of `grpo_core.alerts` as a file of rules for Prometheus, and as a table."""

from __future__ import annotations

from typing import Any

import yaml

from docs.generate.markdown import table
from grpo_core.alerts import ALERTS, Alert

HEAD = "# Made by `make docs` from shared/grpo_core/alerts.py.\n"


def rules() -> str:
    """The text of the file, for Prometheus and for a PrometheusRule of its operator."""
    group = {"name": "grpo", "rules": [_rule(alert) for alert in ALERTS]}
    return HEAD + yaml.safe_dump({"groups": [group]}, sort_keys=False, width=1000)


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": f"grpo-{alert.name}",
        "expr": alert.expression,
        **({"for": f"{alert.hold_s:g}s"} if alert.hold_s else {}),
        "labels": {"severity": alert.severity.value},
        "annotations": {"summary": alert.meaning, "description": alert.advice},
    }


def listed() -> str:
    return table(
        ["Alert", "Severity", "Meaning", "Advice"],
        [[f"`{a.name}`", a.severity.value, a.meaning, a.advice] for a in ALERTS],
    )
