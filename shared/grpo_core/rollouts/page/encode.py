"""Turns records and curves into what the page shows of them, as small as possible."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, takewhile
from statistics import fmean
from typing import Any

from grpo_core.curriculum import PREFIX as CURRICULUM
from grpo_core.errors import BrokenRollouts
from grpo_core.rollouts.record import (
    Message,
    RolloutRecord,
    content_of,
    split_conversation,
    text_of,
)

Json = dict[str, Any]
Pieces = Callable[[Sequence[int]], list[str]]
"""Returns the text of each token of a sequence."""

LOGPROB_STEPS = 10_000
"""Logprobs are integers in units of 1e-4 nats."""
DIFFERENCE_STEPS = 100_000
"""Trainer's logprob - server's logprob: integers in units of 1e-5 nats."""
SNIPPET_CHARACTERS = 80


class GroupEncoder:
    """Encodes groups, and collects the text of every token id that they contain.

    Args:
        pieces: None if the texts of tokens are not known; then the page shows messages
        special: ids of special tokens, which are left out of a group's short description
    """

    def __init__(self, pieces: Pieces | None, special: Iterable[int] = ()) -> None:
        self.texts: dict[int, str] = {}
        self.has_server = False
        """Whether a sequence has the server's logprobs."""
        self.has_trainer = False
        self._pieces = pieces
        self._special = frozenset(special)

    def summary(self, group: Sequence[RolloutRecord]) -> Json:
        """What the page needs of a group to list, filter and sort it."""
        return {
            "group": group[0].group,
            "task": group[0].task or "",
            "snippet": self._snippet(group[0]),
            "sequences": [
                [rounded(one.score), rounded(one.advantage), one.completion_tokens] for one in group
            ],
        }

    def details(self, group: Sequence[RolloutRecord]) -> Json:
        """All that the page shows of a group.

        Raises:
            BrokenRollouts: the lists of a sequence do not have the same length.
        """
        # Tokens with which every sequence begins and which none is trained on.
        columns = zip(*(record.tokens[: record.prompt_length] for record in group), strict=False)
        shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
        return {
            "item": group[0].item,
            "prompt": self._part(group[0], 0, shared) | self._text(group[0], _asked(group[0])),
            "sequences": [self._sequence(record, shared) for record in group],
        }

    def _sequence(self, record: RolloutRecord, shared: int) -> Json:
        self.has_server |= bool(record.behaviour_logprobs)
        self.has_trainer |= bool(record.logprobs)
        return {
            "index": record.index,
            "part": record.part,
            "score": rounded(record.score),
            "parts": {name: rounded(value) for name, value in record.parts.items()},
            "reason": record.reason,
            "advantage": rounded(record.advantage),
            "length": record.completion_tokens,
            "finish_reason": record.finish_reason,
            "versions": record.versions,
            "staleness": record.staleness,
            "temperature": rounded(record.temperature),
            "env_id": record.env_id,
            **self._part(record, shared, len(record.tokens)),
            **_logprobs(record, shared),
            **self._text(record, split_conversation(record)[1]),
        }

    def _part(self, record: RolloutRecord, first: int, end: int) -> Json:
        """The tokens from first to end, and by position: texts other than those of `texts`, such
        as those of parts of a character."""
        tokens = record.tokens[first:end]
        if self._pieces is None:
            return {"tokens": tokens, "texts": {}}
        others: dict[int, str] = {}
        pieces = self._pieces(record.tokens)[first:end]
        for at, (token, text) in enumerate(zip(tokens, pieces, strict=True)):
            if self.texts.setdefault(token, text) != text:
                others[at] = text
        return {"tokens": tokens, "texts": others}

    def _text(self, record: RolloutRecord, messages: Sequence[Message]) -> Json:
        """The text of messages, if no tokens show it."""
        has_texts = self._pieces is not None and record.tokens
        return {} if has_texts else {"text": text_of(messages)}

    def _snippet(self, record: RolloutRecord) -> str:
        """The beginning of the prompt's last message, in one line."""
        prompt = record.tokens[: record.prompt_length]
        if asked := _asked(record):
            text = content_of(asked[-1])
        elif self._pieces is not None:
            pieces = zip(prompt, self._pieces(prompt), strict=True)
            text = "".join(text for token, text in pieces if token not in self._special)
        else:
            text = ""
        line = " ".join(text[: 10 * SNIPPET_CHARACTERS].split())
        return line if len(line) <= SNIPPET_CHARACTERS else f"{line[: SNIPPET_CHARACTERS - 1]}…"


def rounded(value: float | None) -> float | None:
    """With six digits; None if it is no number."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _asked(record: RolloutRecord) -> Sequence[Message]:
    return split_conversation(record)[0]


def _logprobs(record: RolloutRecord, shared: int) -> Json:
    """`runs`: lengths of alternating runs of tokens, the first of which is trained on."""
    trained, server, trainer = sum(record.mask), record.behaviour_logprobs, record.logprobs
    for name in ("behaviour_logprobs", "logprobs", "teacher_logprobs"):
        if (values := getattr(record, name)) and len(values) != trained:
            raise _broken(record, f"{len(values)} {name} for {trained} trained tokens")
    if len(record.mask) != len(record.tokens):
        raise _broken(record, f"mask of {len(record.mask)} for {len(record.tokens)} tokens")
    found: Json = {"runs": _runs(record.mask[shared:])}
    if server:
        found["server"] = [_scaled(value, LOGPROB_STEPS) for value in server]
    if trainer and server:
        pairs = zip(trainer, server, strict=True)
        found["difference"] = [_scaled(a - b, DIFFERENCE_STEPS) for a, b in pairs]
    elif trainer:
        found["trainer"] = [_scaled(value, LOGPROB_STEPS) for value in trainer]
    if record.teacher_logprobs:
        found["teacher"] = [_scaled(value, LOGPROB_STEPS) for value in record.teacher_logprobs]
    return found


def _runs(mask: Sequence[int]) -> list[int]:
    starts = [at for at, (left, right) in enumerate(pairwise([1, *mask])) if left != right]
    return [end - start for start, end in pairwise([0, *starts, len(mask)])]


def _scaled(value: float | None, steps: int) -> int | None:
    return None if value is None or not math.isfinite(value) else round(value * steps)


def _broken(record: RolloutRecord, problem: str) -> BrokenRollouts:
    return BrokenRollouts(
        f"step {record.step}, group {record.group}, sequence {record.index}: {problem}; the record "
        "was not written as grpo_core.rollouts.record describes it"
    )


Point = tuple[float, float]
"""Step and value."""
Interval = tuple[float, float, float]
"""Step, lower and upper end of a confidence interval."""

REWARD = "reward/mean"
PART = "reward/part/"
LENGTH = "rollout/completion_tokens_mean"
ALIGNMENT = "alignment/diff_abs_mean"
STALENESS = "staleness/mean"
EVALUATION = "eval/"
MFU = "train/mfu"

TITLES: Mapping[str, tuple[str, str]] = {
    REWARD: ("Mean reward", ""),
    LENGTH: ("Completion length", "tokens"),
    ALIGNMENT: ("Logprob difference", "nats"),
    "grpo/clipped_fraction": ("Clipped fraction", ""),
    STALENESS: ("Staleness", "steps"),
    "policy/entropy": ("Entropy", "nats"),
    "distill/reverse_kl": ("Divergence from the teacher", "nats"),
    "train/tokens_per_s": ("Training speed", "tokens/s"),
    MFU: ("Share of the device's measured rate (MFU)", ""),
    "train/rank_idle_fraction": ("Share of time in which ranks wait for others", ""),
}
"""Title and unit of a metric, in the order of the page."""


class MeansOfSteps:
    """Means over the sequences of each step."""

    def __init__(self) -> None:
        self.curves: dict[str, list[Point]] = {}

    def add(self, step: int, records: Sequence[RolloutRecord]) -> None:
        for name, values in _values(records):
            known = [value for value in values if value is not None and math.isfinite(value)]
            if known:
                self.curves.setdefault(name, []).append((step, fmean(known)))


def _values(records: Sequence[RolloutRecord]) -> Iterator[tuple[str, list[float | None]]]:
    yield REWARD, [record.score for record in records]
    for part in dict.fromkeys(name for record in records for name in record.parts):
        yield PART + part, [record.parts.get(part) for record in records]
    yield LENGTH, [record.completion_tokens for record in records]
    yield ALIGNMENT, [record.mean_logprob_difference for record in records]
    yield STALENESS, [record.staleness for record in records]


def encoded(
    curves: Mapping[str, Sequence[Point]], intervals: Mapping[str, Sequence[Interval]]
) -> list[Json]:
    """The curves with titles: the reward first, then evaluations, parts of the reward, others."""
    return [
        {
            "name": name,
            "title": title,
            "unit": unit,
            "points": [[rounded(x), rounded(y)] for x, y in curves[name]],
            "interval": [[rounded(value) for value in one] for one in intervals.get(name, ())],
        }
        for name in sorted(curves, key=place_of)
        if curves[name]
        for title, unit in [title_of(name)]
    ]


def title_of(name: str) -> tuple[str, str]:
    """Title and unit."""
    if name.startswith(PART):
        return f"Reward part: {name.removeprefix(PART)}", ""
    if name.startswith(EVALUATION):
        task, _, metric = name.removeprefix(EVALUATION).rpartition("/")
        return f"Evaluation: {metric}" + (f" on {task}" if task else ""), ""
    if name.startswith(CURRICULUM):
        task, _, pool = name.removeprefix(CURRICULUM).rpartition("/")
        return f"Curriculum: {pool} items of {task}", ""
    return TITLES.get(name, (name, ""))


def place_of(name: str) -> tuple[int, int]:
    """Sorts the names of curves into the order of the page."""
    known = [*TITLES]
    if name == REWARD:
        return 0, 0
    if name.startswith(EVALUATION):
        return 1, 0
    if name.startswith(PART):
        return 2, 0
    return 3, known.index(name) if name in known else len(known)
