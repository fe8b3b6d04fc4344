"""Finds parts of a model's text between marks. The time grows with the length of the text alone:
a regular expression would try each opening mark with every end."""

from __future__ import annotations


def between(text: str, opening: str, closing: str, *, to_end: bool = False) -> list[str]:
    """The parts between the marks, without white space around them, in their order.

    Args: to_end: a part whose closing mark is missing reaches to the end of the text
    """
    found, at = [], 0
    while (start := text.find(opening, at)) >= 0:
        start += len(opening)
        end = text.find(closing, start)
        if end < 0 and not to_end:
            break
        at = len(text) if end < 0 else end + len(closing)
        found.append(text[start : at if end < 0 else end].strip())
    return found
