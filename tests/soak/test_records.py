"""What the soak rests on: its records survive the end of a process, its plan hits everything."""

from __future__ import annotations

import gzip
from pathlib import Path

from grpo_core.wire import ScoredGroup
from tests.soak.evidence import Records
from tests.soak.faults import KINDS, plan_faults
from tests.soak.groups import GroupMaker, content_digest, digest
from tests.soak.journal import Joined, Journal, Outcome, Sent, read_journal
from tests.soak.trained_line import TrainedBatch, TrainedLine, read_line
from tests.soak.verdict import Submission


def batches(*ids: int) -> list[TrainedBatch]:
    return [TrainedBatch(id=id_, digests=[f"group of {id_}"]) for id_ in ids]


def joined(path: Path) -> list[Joined]:
    return [entry for entry in read_journal(path) if isinstance(entry, Joined)]


def test_no_two_are_alike() -> None:
    groups = [
        GroupMaker(sender, life, seed=0).make(size, env_id=0)
        for sender in range(3)
        for life in range(3)
        for size in (1, 2)
    ]
    assert len({digest(group) for group in groups}) == len(groups) == 18


def test_some_are_long_enough_to_be_compressed_and_some_to_be_stored_in_pieces() -> None:
    maker = GroupMaker(0, 1, seed=0)
    bodies = [maker.make(2, env_id=0).model_dump_json().encode() for _ in range(150)]
    lengths = [len(body) for body in bodies]
    assert min(lengths) < 1024 < sorted(lengths)[-2]
    assert len(gzip.compress(bodies[-1])) > 1024 * 1024


def test_the_digest_is_of_the_tokens_as_they_come_back() -> None:
    group = GroupMaker(0, 1, seed=0).make(2, env_id=0)
    served = ScoredGroup.model_validate_json(group.model_dump_json())
    assert digest(served) == digest(group)
    assert content_digest([served]) == content_digest([group])
    assert content_digest([served]) != content_digest([served.model_copy(update={"env_id": 1})])


def test_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.write(Joined(env_id=3))
    with path.open("ab") as file:
        file.write(b'{"event": "join')
    assert joined(path) == [Joined(env_id=3)]
    with Journal(path) as journal:
        assert journal.life == 2
        journal.write(Joined(env_id=4))
    assert joined(path) == [Joined(env_id=3), Joined(env_id=4)]


def test_calls_of_all_lives_have_their_own_names(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for name in "ab":
        with Journal(path) as journal:
            journal.sent([name], [2])
    calls = [entry.call for entry in read_journal(path) if isinstance(entry, Sent)]
    assert len(set(calls)) == 2


def test_a_call_without_an_end_is_unanswered(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.settled(journal.sent(["a", "b"], [2, 4]), Outcome.ACKNOWLEDGED)
        journal.sent(["c"], [2])
    entries = list(read_journal(tmp_path / "journal.jsonl"))
    assert Records(line=[], entries={"somebody": entries}).submissions() == [
        Submission("a", 2, Outcome.ACKNOWLEDGED),
        Submission("b", 4, Outcome.ACKNOWLEDGED),
        Submission("c", 2, Outcome.UNANSWERED),
    ]


def test_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    TrainedLine(tmp_path).save(batches(1, 2))
    line = TrainedLine(tmp_path)
    assert (line.checkpoint.step, line.checkpoint.batch_id) == (2, 2)
    line.save(batches(3))
    assert read_line(tmp_path) == batches(1, 2, 3)
    assert TrainedLine(tmp_path).checkpoint.step == 3


def test_what_was_written_after_the_checkpoint_does_not_count(tmp_path: Path) -> None:
    TrainedLine(tmp_path).save(batches(1))
    with (tmp_path / "line.jsonl").open("ab") as file:
        file.write(batches(2)[0].model_dump_json().encode() + b"\n")
    assert read_line(tmp_path) == batches(1)
    TrainedLine(tmp_path).save(batches(4))
    assert read_line(tmp_path) == batches(1, 4)


def test_begins_with_nothing(tmp_path: Path) -> None:
    assert read_line(tmp_path) == []
    assert TrainedLine(tmp_path).checkpoint.batch_id == 0


def test_a_minute_hits_everything() -> None:
    for seed in range(200):
        assert {fault.kind for fault in plan_faults(seed, 50.0)} == set(KINDS)


def test_is_of_its_seed() -> None:
    assert plan_faults(1, 60.0) == plan_faults(1, 60.0) != plan_faults(2, 60.0)


def test_keeps_to_its_time() -> None:
    times = [fault.at_s for fault in plan_faults(3, 60.0)]
    assert times == sorted(times)
    assert 55.0 < times[-1] < 60.0
