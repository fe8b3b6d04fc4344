from __future__ import annotations

import pytest

from grpo_env.inference import health, pool


@pytest.fixture(autouse=True)
def _frequent_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no test waits for a probe."""
    monkeypatch.setattr(pool, "_PROBE_EVERY_S", 0.01)
    monkeypatch.setattr(health, "_FIRST_RECHECK_S", 0.01)
    monkeypatch.setattr(health, "_LAST_RECHECK_S", 0.01)
