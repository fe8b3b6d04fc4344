"""Files of rollouts: whole or absent, a bounded number of them, and damage named with its place."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_core.errors import BrokenRollouts
from grpo_core.rollouts.files import (
    file_of_step,
    read_step,
    read_steps,
    remove_later_steps,
    steps_in,
    write_step,
)
from tests.support.conversations import record
from tests.support.directories import files_of_at_most, names

UNKNOWN = {
    **{"env_id": None, "task": None, "item": None, "logprobs": None, "reason": None},
    **{"advantage": None, "versions": None, "staleness": None, "finish_reason": None},
}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    full = [record(), record(index=1, messages=[{"role": "user", "content": "é\n", "name": "x"}])]
    bare = [record(step=2, messages=[], parts={}, **UNKNOWN)]
    write_step(tmp_path / "new", 2, bare)
    write_step(tmp_path / "new", 1, full)
    assert list(read_steps(tmp_path / "new")) == full + bare
    assert list(read_steps(tmp_path / "new", steps={2, 9})) == bare


def test_a_step_written_again_replaces_its_file_and_the_oldest_steps_go(tmp_path: Path) -> None:
    for step in (9, 10, 11, 10, 1_000_000):
        write_step(tmp_path, step, [record(step=step)], keep=3)
    (tmp_path / "tokenizer.json").touch()
    assert steps_in(tmp_path) == [10, 11, 1_000_000]
    assert len(list(read_steps(tmp_path))) == 3
    remove_later_steps(tmp_path, last=10)
    assert names(tmp_path) == ["step-000010.jsonl.gz", "tokenizer.json"]


def test_a_failed_write_leaves_the_earlier_file_whole(tmp_path: Path) -> None:
    write_step(tmp_path, 1, [record()])
    long = [record(tokens=[i * 7919 % 50000 for i in range(5000)], mask=[0] * 5000)]
    with files_of_at_most(4096), pytest.raises(OSError, match="File too large"):
        write_step(tmp_path, 1, long)
    assert list(read_steps(tmp_path)) == [record()]
    remove_later_steps(tmp_path, last=1)
    assert names(tmp_path) == ["step-000001.jsonl.gz"]


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda whole: whole[:-9], "line 2: Compressed file ended"),
        (lambda whole: b"text" + whole, "line 1: Not a gzipped file"),
        (lambda whole: whole[:30] + b"\xff\xff" + whole[32:], "line 1: "),
        (lambda whole: gzip.compress(gzip.decompress(whole) + b"{}\n"), "line 2: step: Field req"),
        (lambda whole: gzip.compress(gzip.decompress(whole) + b"{"), "line 2: value: Invalid JSON"),
    ],
    ids=["cut off", "no gzip", "changed bytes", "no record", "no JSON"],
)
def test_damage_is_named_with_file_and_line(
    damage: Callable[[bytes], bytes], told: str, tmp_path: Path
) -> None:
    write_step(tmp_path, 7, [record()])
    path = file_of_step(tmp_path, 7)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BrokenRollouts) as error:
        list(read_steps(tmp_path))
    assert str(error.value).startswith(f"{path}, {told}")
    assert "remove this file" in str(error.value)


def test_a_missing_directory_and_a_missing_step_are_named(tmp_path: Path) -> None:
    with pytest.raises(BrokenRollouts, match=r"nowhere cannot be read: No such file"):
        steps_in(tmp_path / "nowhere")
    with pytest.raises(BrokenRollouts, match=r"step-000003\.jsonl\.gz, line 1: .*No such file"):
        list(read_step(tmp_path, 3))
