"""A file of lines that grows, is shortened or replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_runs.watch.followed_file import FollowedFile


def test_only_new_and_complete_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = FollowedFile(path)
    assert [*file.read()] == []
    path.write_bytes(b"one\ntw")
    assert [*file.read()] == [b"one\n"]
    path.write_bytes(b"one\ntwo\n")
    assert [*file.read()] == [b"two\n"]
    assert [*file.read()] == []


@pytest.mark.parametrize("content", [b"one\n", b"one\nother\n", b"one\nother\nmuch longer\n"])
def test_other_content_is_read_from_its_beginning(tmp_path: Path, content: bytes) -> None:
    path, restarts = tmp_path / "file", list[int]()
    path.write_bytes(b"one\ntwo two\n")
    file = FollowedFile(path)
    assert len([*file.read()]) == 2
    path.write_bytes(content)
    assert b"".join(file.read(lambda: restarts.append(1))) == content
    assert restarts == [1]


def test_of_a_long_file_the_beginning_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"first\nsecond\nthird\n")
    assert [*FollowedFile(path, most_bytes=10).read()] == [b"third\n"]


def test_lines_as_text_begin_after_what_was_there_before(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"earlier\n")
    file = FollowedFile(path, offset=path.stat().st_size)
    with path.open("ab") as log:
        log.write(b"10 %\r20 %\nbroken \xff\nnot who")
    assert file.new_lines() == ["10 %", "20 %", "broken \N{REPLACEMENT CHARACTER}"]
    with path.open("ab") as log:
        log.write(b"le\n")
    assert file.new_lines() == ["not whole"]
