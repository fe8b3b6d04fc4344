"""Parts of a reward: how well an answer did in one respect. Pure functions.

`accuracy` and the format parts have values in [0, 1]. The penalties `length`, `repetition` and
`overlong` have values in [-1, 0], so that a positive weight is the strength of the penalty.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Protocol

from grpo_core.errors import GrpoError
from grpo_env.maths.final_answer import (
    ANSWER_TAG,
    END_OF_ANSWER,
    END_OF_THINKING,
    MARK,
    THINK_TAG,
    last_box,
)

_NUMBER = r"[-+]?\$?[0-9][0-9,]*(?:\.[0-9]+)?%?"
_ENDS_IN_NUMBER = re.compile(rf"(?:.*[^0-9.,])?{_NUMBER}\.?")
_BARE_NUMBER = re.compile(_NUMBER)
_MARKED_NUMBER = re.compile(rf"{MARK} *{_NUMBER}")

_TAGS = (THINK_TAG, END_OF_THINKING, ANSWER_TAG, END_OF_ANSWER)
_THINK_ANSWER = re.compile(
    rf"\s*{THINK_TAG}.*{END_OF_THINKING}\s*{ANSWER_TAG}(.*){END_OF_ANSWER}\s*", re.DOTALL
)


class Form(IntEnum):
    """Steps towards a last line `#### <number>`. Each step includes the previous ones, so that a
    policy that reaches one step also finds the next one in its own samples."""

    NONE = 0
    """The answer was cut off, or its last line does not end in a number."""
    ENDS_IN_NUMBER = 1
    BARE_NUMBER = 2
    """The last line is only a number, with or without the mark."""
    MARKED_NUMBER = 3
    """The last line is `#### <number>`, and no other line contains the mark."""


def read_form(text: str, *, finished: bool = True) -> Form:
    """The step that the last line reaches. `finished`: False if the token limit cut it off."""
    last = text.rstrip().rpartition("\n")[2].strip() if finished else ""
    if _MARKED_NUMBER.fullmatch(last) and text.count(MARK) == 1:
        return Form.MARKED_NUMBER
    if _BARE_NUMBER.fullmatch(last) or _MARKED_NUMBER.fullmatch(last):
        return Form.BARE_NUMBER
    return Form.ENDS_IN_NUMBER if _ENDS_IN_NUMBER.fullmatch(last) else Form.NONE


def is_think_answer(text: str) -> bool:
    """Whether the text is `<think>…</think> <answer>…\\boxed{…}…</answer>` and nothing else.

    Each tag must occur exactly once. If the prompt ends in `<think>`, put it before the completion.
    """
    if any(text.count(tag) != 1 for tag in _TAGS):
        return False
    parts = _THINK_ANSWER.fullmatch(text)
    return parts is not None and last_box(parts[1]) is not None


BUFFER_SHARE = 0.2
"""Share of the token limit in which `overlong` grows. DAPO: 4,096 of 20,480 tokens."""

NGRAM_WORDS = 4


class UnknownRewardPart(GrpoError):
    """A weight names a reward part that does not exist. The message lists the parts that do."""


class AnswerLike(Protocol):
    """The part of an answer that penalties look at. `str()` of it is the text."""

    @property
    def finished(self) -> bool:
        """False if the token limit cut the answer off."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens that the model sampled, in all turns."""

    @property
    def max_tokens(self) -> int:
        """The limit of tokens for one completion."""

    def __str__(self) -> str: ...


def accuracy(result: str | None, gold: str, is_equal: Callable[[str, str], bool]) -> float:
    """1.0 if the stated result equals the gold answer; 0.0 if it does not, or if there is none.

    Raises what `is_equal` raises, for example `NotGraded`.
    """
    return 1.0 if result is not None and is_equal(result, gold) else 0.0


def marked_number_format(text: str, *, finished: bool = True) -> float:
    """A third for each step of `Form` towards a last line `#### <number>`."""
    return read_form(text, finished=finished) / Form.MARKED_NUMBER


def think_answer_format(text: str, *, finished: bool = True) -> float:
    """1.0 for `<think>…</think> <answer>…\\boxed{…}…</answer>` and nothing else, otherwise 0.0."""
    return 1.0 if finished and is_think_answer(text) else 0.0


def length(answer: AnswerLike) -> float:
    """Minus the share of the token limit that the answer used."""
    return -min(1.0, len(answer.token_ids) / _limit(answer))


def repetition(answer: AnswerLike) -> float:
    """Minus the share of n-grams of words that occurred before in the same answer.

    Words are separated by white space; case does not matter. The formula is Open-R1's, after
    appendix C.2 of Yeo et al., "Demystifying Long Chain-of-Thought Reasoning" (arXiv 2502.03373).
    """
    words = str(answer).lower().split()
    ngrams = list(zip(*(words[start:] for start in range(NGRAM_WORDS)), strict=False))
    return len(set(ngrams)) / len(ngrams) - 1.0 if ngrams else 0.0


def overlong(answer: AnswerLike) -> float:
    """Falls from 0 to -1 in a buffer at the end of the token limit.

    "Soft overlong punishment", equation 13 of DAPO (arXiv 2503.14476): with a limit of L tokens and
    a buffer of B, an answer of n tokens gets (L - B - n) / B, at most 0 and at least -1. An answer
    that the limit cut off gets -1.
    """
    if not answer.finished:
        return -1.0
    limit = _limit(answer)
    buffer = BUFFER_SHARE * limit
    return max(-1.0, min(0.0, (limit - buffer - len(answer.token_ids)) / buffer))


SHAPING: Mapping[str, Callable[[AnswerLike], float]] = {
    "length": length,
    "repetition": repetition,
    "overlong": overlong,
}
"""Penalties that every task can use."""


def weighted(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The sum of all parts, each times its weight. A part without a weight has weight 1."""
    return sum(weights.get(name, 1.0) * value for name, value in parts.items())


def raise_if_unknown(weights: Iterable[str], parts: Iterable[str]) -> None:
    """
    Args: parts: all that rewards have returned so far

    Raises:
        UnknownRewardPart: a weight has no part.
    """
    unknown = sorted({*weights} - {*parts})
    if unknown:
        raise UnknownRewardPart(
            f"weights for reward parts that do not exist: {', '.join(unknown)}; the parts of the "
            f"reward are {', '.join(sorted(parts)) or 'none'}"
        )


def _limit(answer: AnswerLike) -> int:
    if answer.max_tokens < 1:
        raise ValueError(
            f"max_tokens of the answer is {answer.max_tokens}, but the parts length and overlong "
            "need the limit of tokens"
        )
    return answer.max_tokens
