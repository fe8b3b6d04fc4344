from __future__ import annotations

import pytest

from grpo_trainer.model import onednn


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN computes the small layers of the tests too."""
    monkeypatch.setattr(onednn, "SMALLEST", 0)
