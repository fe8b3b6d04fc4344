from __future__ import annotations

import os

import pytest

from grpo_core.cpu import SPIN_COUNT, WAIT_POLICY, share_cores

NAME, OURS = SPIN_COUNT


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, OURS), ({NAME: "infinity"}, "infinity"), ({WAIT_POLICY: "PASSIVE"}, None)],
)
def test_what_the_user_has_set_wins(
    given: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    share_cores()
    assert os.environ.get(NAME) == expected
