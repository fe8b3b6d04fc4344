from __future__ import annotations

import pytest

from grpo_env.inference import health, pool, server
from tests.support.wait import DEADLINE_S


@pytest.fixture(autouse=True)
def _frequent_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no test waits for a probe, and that all servers were probed at the start of each."""
    monkeypatch.setattr(pool, "_FIRST_PROBES_S", DEADLINE_S)
    monkeypatch.setattr(pool, "_TEND_EVERY_S", 0.01)
    monkeypatch.setattr(server, "_PROBE_EVERY_S", 0.01)
    monkeypatch.setattr(health, "_FIRST_RECHECK_S", 0.01)
    monkeypatch.setattr(health, "_LAST_RECHECK_S", 0.01)
