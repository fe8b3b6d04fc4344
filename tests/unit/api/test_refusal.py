"""The reason for a refusal may quote a body, and reaches terminals and every waiting trainer."""

from __future__ import annotations

from grpo_api.store.stats import MAX_REASON_CHARS, Refusal


def test_the_reason_is_one_short_line_without_control_characters() -> None:
    assert Refusal("scores.1: \x1b[2J\ud800 é\nx", env_id=3).line == "env_id 3: scores.1: ?[2J? é"
    assert Refusal("\n first").line == "first"
    assert Refusal("").line == ""
    assert len(Refusal("long " * 100, env_id=3).line) == MAX_REASON_CHARS
