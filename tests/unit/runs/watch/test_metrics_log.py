"""Curves of a metrics file that grows, and that a resumed run writes again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from grpo_runs.watch.metrics_log import MetricsLog, thinned
from tests.unit.runs.records import metrics_line, metrics_object


def lines(steps: Iterable[int], **changes: float) -> str:
    return "".join(metrics_line(step, **changes) for step in steps)


def test_a_file_that_grows(tmp_path: Path) -> None:
    log, file = MetricsLog(tmp_path / "metrics.jsonl"), tmp_path / "metrics.jsonl"
    log.read_new()
    assert log.rows == []
    file.write_text(lines([1, 2]))
    log.read_new()
    seen = log.rows[-1].serial
    with file.open("a") as more:
        more.write(lines([3]) + '{"step": 4')  # the trainer is still writing it
    log.read_new()
    assert [row.step for row in log.since(seen)] == [3]
    record = metrics_object(1)
    seconds, speed = record["train/step_time"], record["throughput/tokens_per_s"]
    last = log.rows[-1]
    assert (last.time, last.tokens) == (3 * seconds, 3 * seconds * speed)
    assert log.curves("step", 100)["reward/mean"] == [(1, 0.1, 1), (2, 0.2, 2), (3, 0.3, 3)]
    assert [at for at, _, _ in log.curves("time", 100)["reward/mean"]] == [
        seconds,
        2 * seconds,
        3 * seconds,
    ]
    assert log.position_of(2, "time") == 2 * seconds
    assert log.position_of(9, "time") is None


def test_repeated_steps_replace_the_earlier_ones(tmp_path: Path) -> None:
    """A resumed run removes the steps after its checkpoint, and takes them again."""
    log, file = MetricsLog(tmp_path / "metrics.jsonl"), tmp_path / "metrics.jsonl"
    file.write_text(lines(range(1, 6)))
    log.read_new()
    seen = log.rows[-1].serial
    part = tmp_path / "part"
    part.write_text(lines([1, 2, 3]) + lines([4], **{"reward/mean": 9.0}))
    part.replace(file)
    log.read_new()
    assert [(row.step, row.values["reward/mean"]) for row in log.rows][-2:] == [(3, 0.3), (4, 9.0)]
    assert [row.step for row in log.since(seen)] == [1, 2, 3, 4]

    with file.open("a") as more:  # a file that was not shortened
        more.write(lines([2]))
    log.read_new()
    assert [row.step for row in log.rows] == [1, 2]


def test_a_file_that_was_shortened_in_place_and_has_grown_again(tmp_path: Path) -> None:
    """Nobody looked meanwhile."""
    log, file = MetricsLog(tmp_path / "metrics.jsonl"), tmp_path / "metrics.jsonl"
    file.write_text(lines(range(1, 6)))
    log.read_new()
    file.write_text(lines([1, 2]) + lines(range(3, 8), **{"reward/mean": 9.0}))
    log.read_new()
    assert [row.values["reward/mean"] for row in log.rows] == [0.1, 0.2, *[9.0] * 5]
    assert log.restarts == 1


def test_a_curve_has_each_step_once_and_skips_what_is_no_number(tmp_path: Path) -> None:
    """The last line is still being written."""
    file = tmp_path / "metrics.jsonl"
    named = [(1, 1), (3, 7), (2, 2.5), (3, 3)]
    found = [{"step": step, "reward/mean": one, "staleness/mean": "x"} for step, one in named]
    file.write_text("".join(json.dumps(line) + "\n" for line in found) + '{"step": 4')
    log = MetricsLog(file)
    log.read_new()
    assert log.curves("step", 10) == {"reward/mean": [(1, 1, 1), (2, 2.5, 2), (3, 3, 3)]}


def test_broken_lines_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("{\n" + lines([1]) + '{"loss": 1}\n[]\n')
    log = MetricsLog(file)
    log.read_new()
    assert ([row.step for row in log.rows], log.broken_lines) == ([1], [1, 3, 4])


def test_thinned_points_keep_the_ends_of_every_part() -> None:
    points = [(float(at), 0.0, at) for at in range(1000)]
    points[501] = (501.0, 7.0, 501)
    points[777] = (777.0, -7.0, 777)
    kept = thinned(points, 100)
    assert len(kept) <= 100
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert {points[501], points[777]} <= {*kept}
    assert kept == sorted(kept)
    assert thinned(points[:50], 100) == points[:50]
