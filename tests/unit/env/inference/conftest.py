from __future__ import annotations

import pytest

from grpo_env.inference import server


@pytest.fixture(autouse=True)
def _frequent_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no test waits for a probe."""
    monkeypatch.setattr(server, "_PROBE_EVERY_S", 0.01)
    monkeypatch.setattr(server, "_FIRST_RECHECK_S", 0.01)
    monkeypatch.setattr(server, "_LAST_RECHECK_S", 0.01)
