from __future__ import annotations

import os

import pytest

from grpo_core.process.threads import SPIN_COUNT, share_cores


@pytest.mark.parametrize(("given", "expected"), [(None, SPIN_COUNT[1]), ("infinity", "infinity")])
def test_an_existing_variable_wins(
    given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SPIN_COUNT[0], raising=False)
    if given is not None:
        monkeypatch.setenv(SPIN_COUNT[0], given)
    share_cores()
    assert os.environ[SPIN_COUNT[0]] == expected
