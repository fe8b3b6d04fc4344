"""The reason for a refusal may quote a body, and reaches terminals and every waiting trainer."""

from __future__ import annotations

from grpo_api.store.run import MAX_REASON_CHARS, refusal_line


def test_the_reason_is_one_short_line_without_control_characters() -> None:
    assert refusal_line("scores.1: \x1b[2J\ud800 é\nx", 3) == "env_id 3: scores.1: ?[2J? é"
    assert refusal_line("\n first") == "first"
    assert refusal_line("") == ""
    assert len(refusal_line("long " * 100, 3)) == MAX_REASON_CHARS
