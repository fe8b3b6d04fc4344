"""The attempts to sample groups: how often each item was tried and lost.

Losses that fall on long or hard items more than on others warn: training sees too little of these.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from grpo_env.rollout.groups import FailureReason, SampledGroup
from grpo_env.tasks.items import Item

log = structlog.get_logger()

FALSE_ALARMS = 1e-6
"""Largest probability that any warning on a task is wrong, in a run of any length."""
BLOCK = 64
"""Attempts of a task, in the order of their begin, that are compared with each other: so few that
the policy and the servers change little meanwhile. An unfinished block proves nothing."""
_STRENGTHS = (1.0, 2.0, 4.0, 8.0, 16.0)
MEASURES = ("longer prompts", "longer completions", "items of longer completions", "harder items")
ENOUGH = math.log(len(MEASURES) * (len(FailureReason) - 1) / FALSE_ALARMS)  # equal scores: no loss
_ADVICE: Mapping[str, str] = {
    FailureReason.TOO_LONG: "raise --seq-len of the environment and of the trainer",
    FailureReason.UNAVAILABLE: "raise --request-deadline-s, or add inference servers",
    FailureReason.ABORTED: "read the log of the inference server",
    FailureReason.REFUSED: "raise --max-model-len of the inference server",
}
_OWN_CODE = "mend what fails, or raise its deadline: lost.jsonl of --untrained-dir lists each loss"
_LONGEST_DETAIL = 500


@dataclass
class ItemHistory:
    """Attempts at an item, and sums over its graded groups: of the mean score, and of the tokens of
    the longest completion."""

    tried: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    graded: int = 0
    scores: float = 0.0
    tokens: float = 0.0


@dataclass(frozen=True)
class Attempt:
    """number: among those at the item; block: of the task; mean_score, mean_tokens: of the item's
    earlier groups; None: it has none."""

    item: Item
    step: int
    number: int
    block: int
    mean_score: float | None = None
    mean_tokens: float | None = None


class Attempts:
    """The attempts of one environment."""

    def __init__(self) -> None:
        self._items: defaultdict[tuple[str, str], ItemHistory] = defaultdict(ItemHistory)
        self._begun: Counter[str] = Counter()  # by task
        self._losses: defaultdict[str, LossBias] = defaultdict(LossBias)

    def begin(self, item: Item, step: int) -> Attempt:
        """Args: step: that it is sampled for"""
        one, task = self._of(item), item.task.name
        one.tried += 1
        block = self._begun[task] // BLOCK
        self._begun[task] += 1
        known = (one.scores / one.graded, one.tokens / one.graded) if one.graded else ()
        return Attempt(item, step, one.tried, block, *known)

    def on_the_wire(self, item: Item) -> dict[str, Any]:
        """The entry for `group_overrides`: the attempts at the item, and how many were lost for
        each reason; empty if none was."""
        one = self._of(item)
        return {"attempts": {"tried": one.tried, **one.lost}} if one.lost else {}

    def end(
        self, attempt: Attempt, sampled: SampledGroup, prompt_tokens: int | None
    ) -> dict[str, Any] | None:
        """Note how it ended, and warn if losses are biased. Returns the line of `lost.jsonl`; None
        if the group was not lost, or its scores are equal."""
        one, task, lost = self._of(attempt.item), attempt.item.task.name, sampled.lost
        if lost is not None and lost.reason is FailureReason.EQUAL_SCORES:
            lost = None
        longest = max(sampled.completion_lengths, default=0) or None  # 0: not sampled to its end
        if lost is not None:
            one.lost[lost.reason.value] += 1
        if sampled.group is not None:
            one.graded += 1
            one.scores += sum(grade.score for grade in sampled.grades) / len(sampled.grades)
            one.tokens += longest or 0
        easy = attempt.mean_score
        values = (prompt_tokens, longest, attempt.mean_tokens, None if easy is None else -easy)
        self._losses[task].add(task, attempt.block, lost.reason.value if lost else "", values)
        if lost is None:
            return None
        return {
            **{"time": round(time.time(), 3), "step": attempt.step},
            **{"task": task, "item": attempt.item.key, "place": attempt.item.place},
            **{"attempt": attempt.number, "reason": lost.reason.value},
            "detail": lost.detail[:_LONGEST_DETAIL],
            **{"prompt_tokens": prompt_tokens, "completion_tokens": sampled.completion_tokens},
            "mean_score": easy,
        }

    def _of(self, item: Item) -> ItemHistory:
        return self._items[item.task.name, item.key]


class LossBias:
    """Compares the lost attempts at a task with the others, for each reason and measure."""

    def __init__(self) -> None:
        self._blocks: defaultdict[int, list[tuple[str, Sequence[float | None]]]] = defaultdict(list)
        self._evidence: defaultdict[tuple[str, str], LossEvidence] = defaultdict(LossEvidence)

    def add(self, task: str, block: int, reason: str, values: Sequence[float | None]) -> None:
        """Note an attempt, and warn once of a reason and a measure.

        Args: reason: "" if it was not lost; values: one for each of `MEASURES`; None: not known
        """
        self._blocks[block].append((reason, values))
        if len(self._blocks[block]) < BLOCK:
            return
        ended = self._blocks.pop(block)
        for at, measure in enumerate(MEASURES):
            groups: defaultdict[str, list[float]] = defaultdict(list)
            for why, known in ended:
                if (value := known[at]) is not None:
                    groups[why].append(value)
            for why in groups.keys() - {""}:
                evidence = self._evidence[why, measure]
                others = [v for reason, values in groups.items() if reason != why for v in values]
                if evidence.add(groups[why], others) >= ENOUGH and not evidence.is_told:
                    evidence.is_told = True
                    hint = f"training sees too little of them: {_ADVICE.get(why, _OWN_CODE)}"
                    told: dict[str, Any] = {"task": task, "reason": why, "towards": measure}
                    sign = -1 if measure == MEASURES[-1] else 1  # of scores
                    for name, total in evidence.sums.items():
                        told[name] = count = evidence.counts[name]
                        told[f"mean_{name}"] = round(sign * total / max(1, count), 3)
                    log.warning("attempts.biased", **told, by_chance=FALSE_ALARMS, hint=hint)


class LossEvidence:
    """Whether lost attempts have higher values than the others of their block.

    In a block, m of n attempts are lost. a = rank / n - 1/2 of each of the n values; equal values
    share their mean rank. If losses fall on all alike, the m lost ones are a sample without
    replacement, and for S, the sum of their a, and every strength s (Hoeffding 1963, theorem 4)

        E exp(s S) <= (mean of exp(s a) over the n)^m

    So the product over blocks of exp(s S) / that bound is a supermartingale that begins at 1, as is
    its mean over several s, and it ever reaches E with a probability of at most 1 / E (Ville).
    Neither ties, few losses, nor the number of looks need a correction.
    """

    def __init__(self) -> None:
        self._logs = [0.0] * len(_STRENGTHS)
        self.counts, self.sums = Counter[str](), dict.fromkeys(("lost", "others"), 0.0)
        self.is_told = False

    def add(self, lost: Sequence[float], kept: Sequence[float]) -> float:
        """The log of the evidence after one more block."""
        values = sorted([*lost, *kept])
        of = {v: (bisect_left(values, v) + bisect_right(values, v)) / 2 for v in {*values}}
        places = {value: rank / len(values) - 0.5 for value, rank in of.items()}
        total = sum(places[value] for value in lost)
        for at, strength in enumerate(_STRENGTHS):
            mean = sum(math.exp(strength * places[value]) for value in values) / len(values)
            self._logs[at] += strength * total - len(lost) * math.log(mean)
        for name, part in (("lost", lost), ("others", kept)):
            self.counts[name] += len(part)
            self.sums[name] += sum(part)
        most = max(self._logs)
        return most + math.log(sum(math.exp(one - most) for one in self._logs) / len(self._logs))
