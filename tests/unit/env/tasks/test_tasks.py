"""The tasks' items, their order, and how they are divided into training and evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from grpo_env.tasks import Answer, Graded, Message, Row, Split, Task, TaskOptions
from grpo_env.tasks.arithmetic import Arithmetic
from grpo_env.tasks.data_files import DataUnusable
from grpo_env.tasks.item_stream import ItemStream
from grpo_env.tasks.items import Item, content_hash, evaluation_items, is_held_out, training_items

COUNTS, SEEDS = st.integers(1, 40), st.integers()


class Numbered(Task):
    """Rows with these prompts; `test`: those of the split for evaluation, if there is one."""

    def __init__(self, train: Sequence[Any], test: Sequence[Any] | None = None) -> None:
        super().__init__(TaskOptions())
        self._rows = {"train": train, "test": test}

    def rows(self, split: Split) -> Sequence[Row] | None:
        prompts = self._rows[split]
        return None if prompts is None else [{"prompt": prompt} for prompt in prompts]


def items(count: int) -> list[Item]:
    return [Item(Numbered(()), {}, str(number)) for number in range(count)]


def numbers(found: Sequence[Item]) -> list[int]:
    return [int(str(item.prompt)) for item in found]


def take(stream: ItemStream, count: int) -> list[int]:
    return numbers([stream.next() for _ in range(count)])


@pytest.mark.parametrize("completion", ["8", "07", "7 or 8", "77", ""])
def test_only_exactly_the_right_sum_scores(completion: str) -> None:
    task, row = Arithmetic(TaskOptions()), {"question": "3+4=", "answer": "7"}
    assert task.reward(Answer(completion), row) == Graded({"accuracy": 0.0}, "expected 7")
    assert task.reward(Answer(" 7\n"), row).parts == {"accuracy": 1.0}


@pytest.mark.parametrize(("level", "rows"), [(1, 100), (2, 10_000), (3, 10_000), (4, 10_000)])
def test_every_level_of_arithmetic_is_right(level: int, rows: int) -> None:
    found = Arithmetic(TaskOptions(args={"level": level})).rows("train")
    assert found is not None
    assert len(found) == rows
    assert all(eval(row["question"][:-1]) == int(row["answer"]) for row in found)


def test_an_unknown_level_or_argument_is_named() -> None:
    with pytest.raises(ValueError, match="level is 9; expected one of 1, 2, 3, 4"):
        Arithmetic(TaskOptions(args={"level": 9}))
    with pytest.raises(ValueError, match="arithmetic has no argument levle; it has level"):
        Arithmetic(TaskOptions(args={"levle": 1}))


def test_the_seed_and_the_epoch_decide_the_order() -> None:
    def draw(seed: int) -> list[int]:
        return take(ItemStream([(items(50), 1.0)], seed), 100)

    assert draw(1) == draw(1) != draw(2)
    assert draw(1)[:50] != draw(1)[50:]


@given(COUNTS, SEEDS, st.data())
def test_what_does_not_fit_never_comes_again_not_even_in_this_epoch(
    count: int, seed: int, data: st.DataObject
) -> None:
    stream = ItemStream([(items(count), 1.0)], seed)
    seen = take(stream, data.draw(st.integers(0, count)))
    fitting = data.draw(st.sets(st.integers(0, count - 1), min_size=1))

    assert stream.keep(lambda item: int(str(item.prompt)) in fitting) == []

    assert len(stream) == len(fitting)
    rest = fitting - set(seen) if len(seen) < count else set()
    assert set(take(stream, len(rest))) == rest
    assert set(take(stream, len(fitting))) == fitting


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=5), SEEDS)
def test_a_mixture_keeps_its_shares_at_any_time(weights: list[float], seed: int) -> None:
    parts = [[Item(Numbered(()), {}, str(number))] for number in range(len(weights))]
    drawn = Counter(take(ItemStream([*zip(parts, weights, strict=True)], seed), 200))
    for number, weight in enumerate(weights):
        assert drawn[number] == pytest.approx(200 * weight / sum(weights), abs=len(weights))


def test_a_task_of_a_mixture_without_a_fitting_prompt_is_named() -> None:
    stream = ItemStream([(items(2), 1.0), (items(9)[5:], 1.0)], seed=0)
    assert stream.keep(lambda item: int(str(item.prompt)) > 4) == ["numbered"]
    assert set(take(stream, 8)) == {5, 6, 7, 8}


@given(st.integers(150, 200), st.floats(0.1, 0.9))
def test_no_item_is_in_training_and_in_evaluation(count: int, share: float) -> None:
    task = Numbered([f"question {n}" for n in range(count)])
    task.held_out = share
    held_out = evaluation_items(task)
    training = {item.key for item in training_items(task)}
    evaluation = {item.key for item in held_out}
    assert all(item.place.startswith("held-out row") for item in held_out)
    assert not training & evaluation
    assert len(training | evaluation) == count
    assert all(is_held_out(key, share) for key in evaluation)


def test_test_data_loses_the_prompts_of_training_and_repetitions() -> None:
    train = [f"question {n}" for n in range(100)]
    test = [f"question {n % 150}" for n in range(60, 200)]
    task = Numbered(train, test)
    with capture_logs() as logs:
        found = evaluation_items(task)
    assert [item.messages[0]["content"] for item in found] == [
        f"question {n}" for n in range(100, 150)
    ]
    assert [line["dropped"] for line in logs] == [90]
    assert len(training_items(task)) == 100  # nothing is held out where there is test data


def test_equal_prompts_with_other_rows_are_other_items() -> None:
    class Guess(Numbered):
        def rows(self, split: Split) -> Sequence[Row] | None:
            return [{"number": n} for n in range(200)] if split == "train" else None

        def prompt(self, _row: Row) -> list[Message]:
            return [{"role": "user", "content": "Guess my number."}]

    task = Guess(())
    training, evaluation = training_items(task), evaluation_items(task)
    assert len(training) + len(evaluation) == 200
    assert 5 < len(evaluation) < 50


def test_another_system_message_makes_no_other_item() -> None:
    user: Message = {"role": "user", "content": "3+4="}
    assert content_hash([{"role": "system", "content": "Think."}, user]) == content_hash([user])


def test_a_conversation_needs_messages() -> None:
    class Talk(Numbered):
        tools = (sum,)

        def prompt(self, row: Row) -> str:
            return str(row["prompt"])

    with pytest.raises(DataUnusable, match="a conversation needs messages as its prompt"):
        training_items(Talk(["a"]))


def test_data_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(DataUnusable, match="no item for evaluation; pass --eval-data"):
        evaluation_items(Numbered(["a"], ["a"]))
    task = Numbered(["a"])
    task.held_out = 0.9999999
    with pytest.raises(DataUnusable, match="all 1 rows are held out; use --eval-data"):
        training_items(task)


def test_the_split_of_a_row_does_not_depend_on_other_rows() -> None:
    few, many = ([f"question {n}" for n in range(count)] for count in (100, 1000))
    held_out = {item.key for item in evaluation_items(Numbered(many))}
    assert {item.key for item in evaluation_items(Numbered(few))} <= held_out
    assert len(held_out) == pytest.approx(100, abs=40)
