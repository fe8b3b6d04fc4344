"""Finds the one result that an answer states, in the forms that a task allows.

Only one result counts, so listing several numbers gives no extra chance: the first allowed form
that the answer contains decides, and of several results in this form the last one counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from grpo_env.maths.numbers import read_number

MARK = "####"
BOX = r"\boxed{"
ANSWER_TAG, END_OF_ANSWER = "<answer>", "</answer>"
THINK_TAG, END_OF_THINKING = "<think>", "</think>"

LONGEST_RESULT_CHARS = 64
"""Longer results are ignored: they are no plausible numbers, and parsing them is slow."""

_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_MOST_WORDS = 50
"""Longer texts are no answer that could be repeated word for word."""
_BOX_OR_BRACE = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


def marked(text: str) -> str | None:
    """The text after the last `####`, up to the end of the line, as in GSM8K's own solutions."""
    _, mark, rest = text.rpartition(MARK)
    return rest.partition("\n")[0] if mark else None


def tagged(text: str) -> str | None:
    """The last `<answer>…</answer>`: its last `\\boxed{…}`, or all of its text if it has no box."""
    content = _last_tagged(text)
    return content if content is None else last_box(content) or content


def tagged_box(text: str) -> str | None:
    """The last `\\boxed{…}` in the last `<answer>…</answer>`. Other text does not count."""
    content = _last_tagged(text)
    return None if content is None else last_box(content)


def last_box(text: str) -> str | None:
    """The last complete `\\boxed{…}`, box included. Braces may be nested, or escaped as `\\{`."""
    last: tuple[int, int] | None = None
    opened: list[int | None] = []  # where a box starts; None: another brace
    for match in _BOX_OR_BRACE.finditer(text):
        if match.group().startswith(r"\boxed"):
            opened.append(match.start())
        elif match.group() == "{":
            opened.append(None)
        elif match.group() == "}" and opened:
            start = opened.pop()
            if start is not None and (last is None or start > last[0]):
                last = start, match.end()
    return text[slice(*last)] if last else None


def last_line(text: str) -> str | None:
    """The last line, if it is only a number, with or without a unit."""
    line = text.rstrip().rpartition("\n")[2].strip()
    return line if read_number(line) else None


def _last_tagged(text: str) -> str | None:
    before, end, _ = text.rpartition(END_OF_ANSWER)
    _, start, content = before.rpartition(ANSWER_TAG)
    return content if end and start else None


NUMBER_FORMS = (marked, tagged, last_box, last_line)


def find_result(
    text: str,
    forms: Sequence[Callable[[str], str | None]] = NUMBER_FORMS,
    *,
    finished: bool = True,
    longest_chars: int = LONGEST_RESULT_CHARS,
) -> str | None:
    """The text of the stated result, ready to compare; None if the answer states none.

    The result is also None if the deciding form is empty or longer than `longest_chars`: no other
    form takes its place.

    Args:
        forms: the allowed forms, in the order in which they are tried.
        finished: False if the token limit cut the answer off. Its last line is then ignored,
            because digits may be missing.
    """
    text = text if finished else text.rpartition("\n")[0]
    for form in forms:
        found = form(text)
        if found is not None:
            result = found.strip()
            return result if 0 < len(result) <= longest_chars else None
    return None


def stated_answer(solution: str) -> str | None:
    """The final answer of a worked solution: the last `<answer>…</answer>`, else the content of the
    last `\\boxed{…}`, else the text after the last `####`. None if it has none of them."""
    found = _last_tagged(solution)
    box = last_box(solution if found is None else found)
    if box is not None:
        found = box[box.index("{") + 1 : -1]
    if found is None:
        found = marked(solution)
    return found.strip() if found and found.strip() else None


def require_short(answer: str) -> None:
    """Raises `ValueError` if the text is a whole solution, which no answer can equal."""
    words = len(_WORD.findall(answer))
    if words > _MOST_WORDS:
        raise ValueError(
            f"the right answer is a text of {words} words without \\boxed{{}}, #### or <answer>, "
            "which no answer equals; name a column with the answer alone, or a reward of your own"
        )
