"""Writes the page: data, HTML, CSS and JavaScript in one file, which asks no network."""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from grpo_core.rollouts.page.document import document
from grpo_core.rollouts.page.encode import (
    GroupEncoder,
    Interval,
    Json,
    MeansOfSteps,
    Pieces,
    Point,
    encoded,
)
from grpo_core.rollouts.record import RolloutRecord

Group = Sequence[RolloutRecord]

LARGEST_SHARE = 8
"""One step takes at most this share of the page: 1 / LARGEST_SHARE."""


@dataclass(frozen=True)
class EncodedStep:
    """A step in the page. `groups`: see `GroupEncoder.summary`; `all_groups`: their number in the
    step; `data`: the details, packed."""

    step: int
    groups: list[Json]
    all_groups: int
    data: str


class StepSelection:
    """Encodes steps one after the other. If they exceed the limit, every second one is dropped,
    then every second of the remaining ones, and so on. The first and the last step always stay.

    Memory: the limit and one step.

    Args:
        limit: characters of all steps together; the last step and a step that consists of one
            large group may exceed it
    """

    def __init__(self, encoder: GroupEncoder, limit: int) -> None:
        self._encoder = encoder
        self._limit = limit
        self._stride = 1
        self._kept: list[EncodedStep] = []
        self._last: tuple[int, Sequence[Group]] | None = None
        self.seen = 0
        """Number of all steps."""

    def add(self, step: int, groups: Sequence[Group]) -> None:
        """Raises:
        BrokenRollouts: the lists of a sequence do not have the same length."""
        if self.seen % self._stride == 0:
            self._keep(self._encoded(step, groups))
            self._last = None
        else:
            self._last = step, groups
        self.seen += 1

    def finish(self) -> list[EncodedStep]:
        """The kept steps, in order."""
        if self._last is not None:
            self._kept.append(self._encoded(*self._last))
        return self._kept

    def _keep(self, step: EncodedStep) -> None:
        self._kept.append(step)
        while len(self._kept) > 2 and sum(len(one.data) for one in self._kept) > self._limit:
            self._stride *= 2
            self._kept = self._kept[::2]

    def _encoded(self, step: int, groups: Sequence[Group]) -> EncodedStep:
        """All groups of a step, or evenly chosen ones if it is too large."""
        largest, shown = self._limit // LARGEST_SHARE, groups
        while True:
            data = packed({"groups": [self._encoder.details(group) for group in shown]})
            if len(data) <= largest or len(shown) == 1:
                break
            count = max(1, len(shown) * largest // (len(data) + 1))
            shown = [groups[at * len(groups) // count] for at in range(count)]
        summaries = [self._encoder.summary(group) for group in shown]
        return EncodedStep(step, summaries, len(groups), data)


def packed(content: Json) -> str:
    """Compressed JSON in base64. Neither the page's HTML nor its scripts can be ended by it."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


LIMIT = 20_000_000
"""Characters of the rollouts in a page."""


def write_page(
    path: Path,
    title: str,
    records: Iterable[RolloutRecord],
    curves: Mapping[str, Sequence[Point]],
    pieces: Pieces | None,
    facts: Mapping[str, str],
    *,
    intervals: Mapping[str, Sequence[Interval]] | None = None,
    special: Collection[int] = (),
    limit: int = LIMIT,
) -> None:
    """Write the page completely or not at all. Memory is bounded by `limit` and one step.

    Args:
        records: in order of steps, and in a step of groups
        curves: by the name of the metric. Curves that the rollouts give, such as `reward/mean`,
            are added if they are missing.
        pieces: returns the text of each token; None if no tokenizer is known
        facts: what the head of the page lists
        intervals: confidence intervals of curves, by their name
        special: ids of special tokens
        limit: size of the rollouts in the page, in characters. If they exceed it, the page holds
            evenly chosen steps, with the first and the last one, and says so.

    Raises:
        BrokenRollouts: the lists of a sequence do not have the same length.
        OSError: the file could not be written.
    """
    encoder, means = GroupEncoder(pieces, special), MeansOfSteps()
    selection = StepSelection(encoder, limit)
    for step, of_step in groupby(records, key=lambda record: record.step):
        in_step = list(of_step)
        means.add(step, in_step)
        groups = groupby(in_step, key=lambda record: record.group)
        selection.add(step, [list(group) for _, group in groups])
    steps = selection.finish()
    content: Json = {
        "title": title,
        "facts": [*facts.items()],
        "curves": encoded(means.curves | dict(curves), intervals or {}),
        "texts": encoder.texts,
        "has_server": encoder.has_server,
        "has_trainer": encoder.has_trainer,
        "special": sorted(special),
        "steps": [
            {"step": one.step, "groups": one.groups, "all_groups": one.all_groups} for one in steps
        ],
        "all_steps": selection.seen,
    }
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(_document(title, content, steps))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _document(title: str, content: Json, steps: Sequence[EncodedStep]) -> bytes:
    data = [f'<script type="text/plain" id="content">{packed(content)}</script>']
    data += [
        f'<script type="text/plain" id="step-{at}">{step.data}</script>'
        for at, step in enumerate(steps)
    ]
    values = {"{{data}}": "\n".join(data), "{{title}}": html.escape(title)}
    return document("page.html", ["page.css"], ["report.js"], values).content
