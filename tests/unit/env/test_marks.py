"""Parts of a text between marks."""

from __future__ import annotations

import pytest

from grpo_env.marks import between


@pytest.mark.parametrize(
    ("text", "found", "found_to_end"),
    [
        ("a < b > c <d>", ["b", "d"], ["b", "d"]),
        ("none", [], []),
        ("<>", [""], [""]),
        ("<a< b>c>", ["a< b"], ["a< b"]),
        ("<a> <b\n", ["a"], ["a", "b"]),
        ("> <", [], [""]),
    ],
)
def test_parts_are_found_in_their_order(
    text: str, found: list[str], found_to_end: list[str]
) -> None:
    assert between(text, "<", ">") == found
    assert between(text, "<", ">", to_end=True) == found_to_end


def test_many_marks_without_an_end_are_read_once() -> None:
    """A regular expression takes minutes for this text."""
    assert between("<tool_call>\n\n" * 200_000, "<tool_call>", "</tool_call>") == []
