"""The records of the soak outlive the processes that write them."""

from __future__ import annotations

from pathlib import Path

from tests.soak.journal import Joined, Journal, Outcome, Reader
from tests.soak.records import submissions
from tests.soak.verdict import Submission


def test_the_unfinished_line_of_a_killed_process_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    reader = Reader(path)
    with Journal(path) as journal:
        journal.write(Joined(env_id=3))
    with path.open("ab") as file:
        file.write(b'{"event": "join')
    reader.read_on()
    with Journal(path) as journal:
        assert (journal.life, journal.past[-1]) == (2, Joined(env_id=3))
        journal.write(Joined(env_id=4))
    reader.read_on()
    assert [entry for entry in reader.entries if isinstance(entry, Joined)] == [
        Joined(env_id=3),
        Joined(env_id=4),
    ]


def test_a_call_without_an_end_is_unanswered_and_its_last_end_counts(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        hung_up = journal.sent({"a": 2, "b": 4})
        journal.settled(hung_up, Outcome.UNANSWERED)
        journal.settled(hung_up, Outcome.ACKNOWLEDGED)
        journal.sent({"c": 2})
    with Journal(path) as journal:  # whose calls have other names
        journal.settled(journal.sent({"d": 2}), Outcome.ACKNOWLEDGED)
    reader = Reader(path)
    reader.read_on()
    assert list(submissions(reader.entries)) == [
        Submission("a", 2, Outcome.ACKNOWLEDGED),
        Submission("b", 4, Outcome.ACKNOWLEDGED),
        Submission("c", 2, Outcome.UNANSWERED),
        Submission("d", 2, Outcome.ACKNOWLEDGED),
    ]
