"""An environment that is started again goes on behind the items that it used."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from grpo_env.tasks import Row, Split, Task, TaskOptions
from grpo_env.tasks.curriculum import learnable
from grpo_env.tasks.item_stream import ItemStream
from grpo_env.tasks.items import Draw, DrawNumbers, Item


class Named(Task):
    def __init__(self, name: str, data: str | None = None) -> None:
        super().__init__(TaskOptions(data=data))
        self.name = name

    def rows(self, split: Split) -> Sequence[Row] | None:
        raise NotImplementedError


def items(count: int, name: str = "task", data: str | None = None) -> list[Item]:
    task = Named(name, data)
    return [Item(task, {"n": number}, f"{name} {number}") for number in range(count)]


@given(st.sets(st.integers(0, 60)), st.integers(0, 60))
def test_numbers_are_written_as_ranges_and_read_again(numbers: set[int], more: int) -> None:
    found = DrawNumbers()
    for number in numbers:
        found.add(number)
    with_one_more = found.written(more)
    written = found.written()
    assert {
        number
        for part in written.split(",") * bool(written)
        for first, last in [map(int, part.split("-"))]
        for number in range(first, last + 1)
    } == numbers
    assert found.end == max(numbers, default=-1) + 1
    assert {*found.missing()} == {*range(found.end)} - numbers
    if written:
        again = DrawNumbers.parse(written)
        assert (again.written(), again.missing()) == (written, found.missing())
    found.add(more)
    assert found.written() == with_one_more


@given(
    st.integers(1, 12),
    st.integers(),
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 2**32)), min_size=1, max_size=6),
    st.sets(st.integers(0, 11)),
)
def test_however_often_it_stops_each_item_is_used_once_in_a_pass(
    count: int, seed: int, processes: list[tuple[int, int]], too_long: set[int]
) -> None:
    """Each process has several groups in progress. Some end, in any order, and the others are lost
    as it is killed. Items that are too long do not come."""
    usable = {*range(count)} - too_long or {*range(count)}
    kept: dict[str, str] = {}
    used: dict[int, int] = {}

    def started() -> ItemStream:
        stream = ItemStream([(items(count), 1.0)], seed)
        stream.keep(lambda item: item.row["n"] in usable)
        stream.go_on(kept, step=0)
        return stream

    def end(stream: ItemStream, draw: Draw) -> None:
        kept.update(stream.positions(draw))
        stream.used(draw)
        assert draw.number not in used
        used[draw.number] = draw.item.row["n"]

    for drawn, order in processes:
        stream = started()
        going = [stream.draw() for _ in range(drawn)]
        for number, draw in enumerate(going):
            if order >> number & 1:
                end(stream, draw)
            elif order >> number & 2:
                stream.put_back(draw)
    passes = max(used, default=0) // count + 1
    stream = started()
    while len(used) < passes * len(usable):
        end(stream, stream.draw())
    of_pass = [{n for k, n in used.items() if k // count == number} for number in range(passes)]
    assert of_pass == [usable] * passes


def test_each_task_of_a_mixture_and_a_curriculum_go_on() -> None:
    parts = [(items(50, "a"), 0.5), (items(50, "b"), 0.5)]
    for rule in (None, learnable):
        first, again, whole = (ItemStream(parts, 7, rule) for _ in range(3))
        with capture_logs() as logs:
            for _ in range(21):
                draw = first.draw()
                kept = first.positions(draw)
                first.used(draw)
            again.go_on(kept, step=5)
        told = [(line["event"], line["task"], line["used"]) for line in logs]
        assert told == [("items.continued", "a", 11), ("items.continued", "b", 10)]
        drawn = [whole.next().prompt for _ in range(21 + 41)]
        of_b = [again.next().prompt for _ in range(40)][1::2]
        assert of_b == [prompt for prompt in drawn if prompt.startswith("b")][10:30]


def test_an_item_that_fails_twice_has_had_its_turn() -> None:
    """Else one that no server can answer would be the only one that is asked for."""
    stream = ItemStream([(items(3), 1.0)], 0)
    drawn = []
    for _ in range(4):
        draw = stream.draw()
        drawn.append(draw.number)
        stream.put_back(draw)
    assert drawn == [0, 0, 1, 1]
    draw = stream.draw()
    assert [*stream.positions(draw).values()] == ["0-2"]


def test_a_curriculum_that_was_restored_leaves_no_gaps() -> None:
    first, again = (ItemStream([(items(9), 1.0)], 0, learnable) for _ in range(2))
    for _ in range(5):
        first.put_back(first.draw())
    again.restore(first.state())
    assert [*again.positions(again.draw()).values()] == ["0-5"]


def test_changed_data_and_items_that_nobody_knows_are_named() -> None:
    stream = ItemStream([(items(5, data="rows.jsonl"), 1.0)], 0)
    kept = stream.positions(stream.draw())
    with capture_logs() as logs:
        ItemStream([(items(5, data="rows.jsonl"), 1.0)], 0).go_on({}, step=0)
        ItemStream([(items(5, data="other.jsonl"), 1.0)], 0).go_on(kept, step=0)
        assert {line["event"] for line in logs} == {"items.continued"}
        logs.clear()
        ItemStream([(items(6, data="rows.jsonl"), 1.0)], 0).go_on(kept, step=3)
        ItemStream([(items(5), 1.0)], 1).go_on(kept, step=3)
    assert [(line["event"], line["log_level"]) for line in logs] == [
        ("items.begun_again", "warning")
    ] * 2
    assert "rows.jsonl" in logs[0]["reason"]
    assert "--seed" in logs[1]["reason"]
