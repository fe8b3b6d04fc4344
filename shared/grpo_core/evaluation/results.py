"""Results of an evaluation: their records, and the files that hold them.

`eval.jsonl` has one line per evaluation. The directory `eval/` beside it has one JSON file per
whole result.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, Field, FiniteFloat, computed_field, model_validator

from grpo_core.errors import GrpoError, parsing
from grpo_core.evaluation.statistics import Interval, mean_at_k, mean_interval, pass_at_k
from grpo_core.wire.policy_version import PolicyVersion

ACCURACY = "accuracy"
"""The reward part that tells whether an answer is right."""
PASS, MEAN = "pass", "mean"
METRICS_PREFIX = "eval"

Count = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]


class NothingEvaluated(GrpoError):
    """No item of a task could be evaluated."""


class EvalItem(BaseModel, frozen=True, extra="ignore"):
    """The n answers to one item. All fields but the first two have one entry per answer."""

    task: str
    item: str
    """Content hash of the prompt."""
    rewards: Annotated[tuple[FiniteFloat, ...], Field(min_length=1)]
    parts: tuple[dict[str, FiniteFloat], ...]
    lengths: tuple[Count, ...]
    """Tokens of the completions."""
    truncated: tuple[bool, ...]
    """True if the token limit cut the answer off."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def right(self) -> tuple[bool, ...]:
        """Whether the part `accuracy`, or without such a part the reward, is 1 or more."""
        both = zip(self.parts, self.rewards, strict=True)
        return tuple(part.get(ACCURACY, reward) >= 1 for part, reward in both)

    @model_validator(mode="after")
    def _one_entry_per_answer(self) -> Self:
        lists = ("rewards", "parts", "lengths", "truncated")
        counts = {name: len(getattr(self, name)) for name in lists}
        if len(set(counts.values())) > 1:
            raise ValueError(f"item {self.item}: expected one entry per answer, got {counts}")
        return self

    def pass_at(self, k: int) -> float:
        return pass_at_k(len(self.right), sum(self.right), k)

    def mean_at(self, k: int) -> float:
        return mean_at_k(self.rewards, k)


class EvalSummary(BaseModel, frozen=True, extra="ignore"):
    """One line of `eval.jsonl`."""

    task: str
    model: str | None = None
    """Name of the model, if it is not that of a training run."""
    step: Count | None = None
    """Training steps that the weights include; None after a run."""
    versions: tuple[PolicyVersion, PolicyVersion] | None = None
    """Lowest and highest policy version that sampled an answer; None if the server gave none."""
    answers_by_version: dict[str, Count] = Field(default_factory=dict)
    """Number of sampled sequences by policy version: `1.4`; `1.4 to 1.5` if the weights changed
    meanwhile."""
    temperature: Annotated[float, Field(ge=0)]
    """0 is greedy: always the most likely token."""
    samples: AtLeastOne
    """Answers to each item."""
    item_count: AtLeastOne
    left_out: dict[str, Count] = Field(default_factory=dict)
    """Number of items that were not evaluated, by reason."""
    metrics: dict[str, FiniteFloat]
    """`pass@k`, `mean@k`, `part/NAME`, `length` (tokens) and `truncated` (share)."""
    intervals: dict[str, Interval]
    """95 % intervals of metrics `pass@k` and `mean@k`."""
    duration_s: float

    def flat(self) -> dict[str, float]:
        """For metric sinks: `eval/<task>/pass@1`, and the ends of intervals as `.../pass@1/low`."""
        root = f"{METRICS_PREFIX}/{self.task}"
        values = {f"{root}/{name}": value for name, value in self.metrics.items()}
        for name, interval in self.intervals.items():
            values |= {f"{root}/{name}/low": interval.low, f"{root}/{name}/high": interval.high}
        return values


class EvalResult(EvalSummary):
    """An evaluation with all its items."""

    items: tuple[EvalItem, ...]

    @classmethod
    def of(
        cls,
        items: Sequence[EvalItem],
        *,
        task: str,
        ks: Iterable[int] = (),
        left_out: Mapping[str, int] | None = None,
        last_failure: str = "",
        seed: int = 0,
        **facts: Any,
    ) -> Self:
        """Estimate the metrics.

        Args:
            items: different ones of the task, each with as many answers
            ks: empty means 1 and the number of answers to each item
            last_failure: why the last item was left out
            seed: of the bootstrap
            facts: fields of `EvalSummary` that do not follow from the items

        Raises:
            NothingEvaluated: there are no items.
            ValueError: a k is larger than the number of answers.
        """
        left_out = {reason: count for reason, count in (left_out or {}).items() if count}
        if not items:
            reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
            last = f", the last one because: {last_failure}" if last_failure else ""
            raise NothingEvaluated(
                f"{task}: no item was evaluated ({reasons or 'the data set is empty'}{last}); "
                "check the data set and the log"
            )
        samples = len(items[0].rewards)
        several = sorted({*ks} or {1, samples})
        per_item = {f"{PASS}@{k}": [item.pass_at(k) for item in items] for k in several}
        per_item |= {f"{MEAN}@{k}": [item.mean_at(k) for item in items] for k in several}
        found = {name: mean_interval(values, seed) for name, values in per_item.items()}
        return cls(
            task=task,
            samples=samples,
            item_count=len(items),
            left_out=left_out,
            metrics={n: fmean(values) for n, values in per_item.items()} | _facts(items),
            intervals={name: ends for name, ends in found.items() if ends},
            items=tuple(items),
            **facts,
        )

    def line(self) -> str:
        """The line of `eval.jsonl`, without newline."""
        return self.model_dump_json(exclude={"items"})


def _facts(items: Sequence[EvalItem]) -> dict[str, float]:
    """Means over all answers."""
    parts: dict[str, list[float]] = {}
    for item in items:
        for part in item.parts:
            for name, value in part.items():
                parts.setdefault(name, []).append(value)
    return {
        **{f"part/{name}": fmean(values) for name, values in sorted(parts.items())},
        "length": fmean(length for item in items for length in item.lengths),
        "truncated": fmean(cut for item in items for cut in item.truncated),
    }


_NOT_IN_FILE_NAMES = re.compile(r"[^\w.-]+")

Record = TypeVar("Record", bound=EvalSummary)


class ResultsUnusable(GrpoError):
    """A file of evaluations cannot be written, or does not hold evaluations."""


def save(result: EvalResult, output: Path, label: str = "") -> Path:
    """Append the line to `output`, and write the whole result; returns the path of the latter.

    Args:
        output: for example `eval.jsonl`
        label: tells results of one task and step apart

    Raises:
        ResultsUnusable: the files cannot be written.
    """
    details = details_path(result, output, label)
    try:
        details.parent.mkdir(parents=True, exist_ok=True)
        temporary = details.with_suffix(".part")
        temporary.write_text(result.model_dump_json() + "\n", encoding="utf-8")
        temporary.replace(details)
        with output.open("a", encoding="utf-8") as file:
            file.write(result.line() + "\n")
    except OSError as error:
        raise ResultsUnusable(f"cannot write {error.filename}: {error.strerror}") from error
    return details


def details_path(result: EvalSummary, output: Path, label: str = "") -> Path:
    """For example `eval/gsm8k-step-000012.json`."""
    step = "" if result.step is None else f"step-{result.step:06}"
    name = "-".join(filter(None, (result.task, step, label)))
    return output.with_suffix("") / f"{_NOT_IN_FILE_NAMES.sub('-', name)}.json"


def read_result(path: Path) -> EvalResult:
    """The result that `save` wrote. Raises `ResultsUnusable`."""
    return _parsed(EvalResult, _text(path), str(path))


def read_results(output: Path) -> list[EvalResult]:
    """All results that `save` wrote for this `output`, by name. Raises `ResultsUnusable`."""
    return [read_result(path) for path in sorted(output.with_suffix("").glob("*.json"))]


def read_summaries(path: Path) -> list[EvalSummary]:
    """The complete lines of `eval.jsonl`. Raises `ResultsUnusable`, which names the line."""
    lines = _text(path).split("\n")[:-1]
    return [summary_of(line, f"{path} line {number}") for number, line in enumerate(lines, start=1)]


def summary_of(line: str | bytes, place: str) -> EvalSummary:
    """Read a line of results. Raises `ResultsUnusable`, which names the `place` of the line."""
    return _parsed(EvalSummary, line, place)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ResultsUnusable(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ResultsUnusable(f"{path} is no evaluation: it is not UTF-8: {error}") from error


def _parsed(kind: type[Record], text: str | bytes, place: str) -> Record:
    with parsing(f"{place} is no evaluation", ResultsUnusable):
        return kind.model_validate_json(text)
