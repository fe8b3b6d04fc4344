"""Curricula: the weights of items, worked by hand; what is saved, and that a stream goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_env.loading import find_rule
from grpo_env.tasks import Row, Split, Task, TaskOptions
from grpo_env.tasks.curriculum import (
    EXPLORATION,
    CurriculumUnusable,
    ItemFacts,
    Rule,
    checked_weights,
    learnable,
)
from grpo_env.tasks.curriculum_files import CurriculumFiles
from grpo_env.tasks.item_stream import ItemStream
from grpo_env.tasks.items import Item


class Named(Task):
    def __init__(self, name: str) -> None:
        super().__init__(TaskOptions())
        self.name = name

    def rows(self, split: Split) -> Sequence[Row] | None:
        return [] if split == "train" else None


SUMS, WORDS = Named("sums"), Named("words")


def items(count: int, task: Task = SUMS) -> list[Item]:
    return [Item(task, {"n": number}, f"{task.name} {number}") for number in range(count)]


def seen(rate: float, completions: float = 8.0, step: int = 0) -> ItemFacts:
    return ItemFacts({}, "sums", rate, rate * (1 - rate), completions, step)


def unseen() -> ItemFacts:
    return ItemFacts({}, "sums")


def shares(weights: Sequence[float]) -> list[float]:
    return [weight / sum(weights) for weight in weights]


def test_an_item_is_as_learnable_as_its_scores_vary() -> None:
    # With the prior's 0.05 + 0.05 completions, of 8.1: 0.05/8.1 * 8.05/8.1 = 0.0061347 for a rate
    # of 0 or 1; 4.05/8.1 = 0.5, so 0.25, for 0.5; 2.05/8.1 * 6.05/8.1 = 0.1890337 for 0.25.
    found = learnable([seen(0.0), seen(0.5), seen(1.0), seen(0.25)], 0)
    expected = [0.0061347, 0.25, 0.0061347, 0.1890337]
    assert found == pytest.approx([one / sum(expected) for one in expected], rel=1e-4)


def test_equal_scores_between_0_and_1_teach_nothing() -> None:
    constant = ItemFacts({}, "sums", 0.5, 0.0, 8.0)
    assert learnable([constant, seen(0.5)], 0)[0] < 0.02


def test_unseen_items_share_half_of_the_draws() -> None:
    found = learnable([*[unseen()] * 4, seen(0.5), seen(0.5), seen(0.0)], 3)
    assert found[:4] == pytest.approx([EXPLORATION / 4] * 4)
    assert sum(found[4:]) == pytest.approx(1 - EXPLORATION)
    assert learnable([unseen(), unseen()], 3) == [0.5, 0.5]


def test_no_unseen_item_is_drawn_more_than_the_best_one() -> None:
    one = learnable([seen(0.5), seen(0.5), seen(0.0), unseen()], 0)
    assert one[3] == one[0] == one[1] > one[2]


def test_an_item_whose_groups_are_lost_is_drawn_less_and_less() -> None:
    stream, known = ItemStream([(items(200), 1.0)], 0, learnable), items(200)
    lost, draws = 0, 2000
    for _ in range(draws):
        item = stream.next()
        if item.row["n"] < 10:  # 10 groups of 200 in a uniform order
            stream.lost(known[item.row["n"]])
            lost += 1
        else:
            stream.graded(item, [1.0, 0.0], 1)
    assert lost < 10 / 200 * draws


def test_a_late_group_takes_no_weight_from_newer_scores() -> None:
    """The scores of step 0 count half at step 20, whenever they come."""
    for order in ([0, 20, 20], [20, 0, 20]):
        noting, [item] = Noting(), items(1)
        stream = ItemStream([(items(1), 1.0)], 0, noting)
        for step in order:
            stream.graded(item, [1.0 if step else 0.0], step)
        assert noting.of(stream) == [pytest.approx(2 / 2.5)]


def test_a_solved_item_comes_back_with_its_age() -> None:
    # After 60 steps 8 completions count 1: 0.05/1.1 * 1.05/1.1 = 0.0433884. After 300 nearly 0.
    now = [seen(1.0, step=300), seen(1.0, step=240), seen(1.0, step=0), seen(0.5, step=300)]
    found = learnable(now, 300)
    assert [one / found[3] * 0.25 for one in found] == pytest.approx(
        [0.0061347, 0.0433884, 0.25, 0.25], rel=1e-4
    )


FACTS = st.builds(
    lambda rate, share, completions, step: ItemFacts(
        {}, "sums", rate, share * rate * (1 - rate), completions, step
    ),
    *(st.floats(0, 1), st.floats(0, 1), st.floats(1, 1e4), st.integers(0, 10_000)),
)


@given(st.lists(FACTS | st.builds(unseen), min_size=1, max_size=30), st.integers(0, 10_000))
def test_every_item_keeps_a_chance_and_the_chances_add_up_to_1(
    facts: list[ItemFacts], step: int
) -> None:
    found = checked_weights(learnable, facts, step)
    assert min(found) > 0
    assert sum(found) == pytest.approx(1)


def test_solve_rates_are_on_the_scale_of_the_scores_that_the_task_gave() -> None:
    noting, [first, second, third] = Noting(), items(3)
    stream = ItemStream([(items(3), 1.0)], 0, noting)
    stream.graded(first, [0.4, 0.4], 1)  # until scores differ, from 0 to 1
    assert noting.of(stream) == [0.4, None, None]
    stream.graded(second, [-1.0, 1.0], 1)
    assert noting.of(stream) == [pytest.approx(0.7), 0.5, None]  # (0.4 + 1) / 2
    stream.graded(third, [1.0, 1.0], 1)
    assert noting.of(stream) == [pytest.approx(0.7), 0.5, 1.0]
    # 20 steps later the two earlier scores count one half each: (1 * 0.5 + 2 * 1) / 3.
    stream.graded(second, [1.0, 1.0], 21)
    assert noting.of(stream)[1] == pytest.approx((0.5 + 2) / 3)


def test_pools_count_items_by_their_solve_rate() -> None:
    stream = ItemStream([(items(5), 0.5), (items(1, WORDS), 0.5)], 0, learnable)
    for item, right in zip(items(4), [0, 1, 7, 8], strict=True):
        stream.graded(item, [1.0] * right + [0.0] * (8 - right), 1)
    assert stream.pools() == {
        "sums": {"unseen": 1, "hard": 1, "medium": 2, "easy": 1},
        "words": {"unseen": 1, "hard": 0, "medium": 0, "easy": 0},
    }


def test_most_draws_are_of_the_item_that_is_solved_sometimes() -> None:
    stream, known = ItemStream([(items(3), 1.0)], 0, learnable), items(3)
    for item, right in zip(known, [0, 4, 8], strict=True):
        stream.graded(item, [1.0] * right + [0.0] * (8 - right), 1)
    drawn = Counter(stream.next().row["n"] for _ in range(400))
    # 0.25 of 0.25 + 2 * 0.0061347 is 0.953; 400 draws have a standard deviation of 4.2.
    assert drawn[1] == pytest.approx(381, abs=17)


def test_the_weights_follow_the_scores_after_sixteen_groups() -> None:
    stream, [_, second] = ItemStream([(items(2), 1.0)], 0, by_rate), items(2)
    stream.next()
    for _ in range(16):
        stream.graded(second, [1.0, 0.0], 1)
    assert {stream.next().row["n"] for _ in range(50)} == {1}


@settings(max_examples=25)  # each writes a file
@given(st.integers(), st.lists(st.tuples(st.integers(0, 7), st.integers(0, 4)), max_size=40))
def test_a_restored_stream_goes_on_with_the_same_draws(
    tmp_path_factory: pytest.TempPathFactory, seed: int, groups: list[tuple[int, int]]
) -> None:
    directory = tmp_path_factory.mktemp("state")
    parts = [(items(8), 0.7), (items(4, WORDS), 0.3)]
    stopped = ItemStream(parts, seed, learnable)
    stopped.next()
    for step, (number, right) in enumerate(groups):
        stopped.next()
        stopped.graded(items(8)[number], [1.0] * right + [0.0] * (4 - right), step)
    CurriculumFiles(directory, stopped).save(len(groups))

    again, twice = (restored(directory, parts, seed) for _ in range(2))

    assert again.pools() == stopped.pools()
    assert [again.next().key for _ in range(40)] == [twice.next().key for _ in range(40)]
    assert again.state()["sums"].items == stopped.state()["sums"].items


def test_a_restored_stream_does_not_draw_the_first_items_again() -> None:
    stream, again = (ItemStream([(items(50), 1.0)], 0, learnable) for _ in range(2))
    [stream.next() for _ in range(50)]
    again.restore(stream.state())
    assert [again.next() for _ in range(50)] == [stream.next() for _ in range(50)]


def test_a_task_that_a_restored_mixture_did_not_have_gets_its_share_alone() -> None:
    stream = ItemStream([(items(5), 1.0)], 0, learnable)
    [stream.next() for _ in range(100)]
    again = ItemStream([(items(5), 0.5), (items(5, WORDS), 0.5)], 0, learnable)
    again.restore(stream.state())
    assert Counter(again.next().task.name for _ in range(50)) == {"sums": 25, "words": 25}


def test_what_has_not_changed_is_not_saved_again(tmp_path: Path) -> None:
    """A resumed run that fails before its first step must not end the curve at step 0."""
    stream = ItemStream([(items(5), 1.0)], 0, learnable)
    files = CurriculumFiles(tmp_path, stream)
    stream.next()
    files.save(7)
    files.save(8)
    again = CurriculumFiles(tmp_path, ItemStream([(items(5), 1.0)], 0, learnable))
    again.restore()
    again.save(0)
    assert (tmp_path / "pools.jsonl").read_text().count('"step": ') == 1


def test_items_that_the_data_lost_are_forgotten(tmp_path: Path) -> None:
    stream = ItemStream([(items(5), 1.0)], 0, learnable)
    for item in items(5):
        stream.graded(item, [1.0, 0.0], 1)
    CurriculumFiles(tmp_path, stream).save(1)
    again = restored(tmp_path, [(items(3), 1.0)], 0)
    assert again.pools() == {"sums": {"unseen": 0, "hard": 0, "medium": 3, "easy": 0}}


def test_a_broken_state_is_named(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"tasks": {"sums": {"draws": "many"}}}')
    with pytest.raises(CurriculumUnusable, match=r"--curriculum-dir: .*state.json.*draws.*remove"):
        restored(tmp_path, [(items(3), 1.0)], 0)


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("return [1.0]", r"sampler\(items, step\) returned 1 weights for 4 items"),
        ("return [0.0] * len(items)", "only weights of 0"),
        ("return [-1.0] * len(items)", "returned -1 for item 0"),
        ("return [i.solve_rate > 0 for i in items]", "raised TypeError: '>' not supported"),
    ],
)
def test_a_rule_is_tried_before_the_first_draw(tmp_path: Path, code: str, problem: str) -> None:
    file = tmp_path / "my.py"
    file.write_text(f"def sampler(items, step):\n    {code}\n")
    rule = find_rule(f"{file}:sampler")
    with pytest.raises(CurriculumUnusable, match=problem):
        ItemStream([(items(9), 1.0)], 0, rule)


def test_a_rule_that_does_not_exist_is_named(tmp_path: Path) -> None:
    file = tmp_path / "my.py"
    file.write_text("def easy_first(items, step):\n    return [1.0] * len(items)\n")
    with pytest.raises(CurriculumUnusable, match=r"--curriculum: .*no 'sampler'.*easy_first"):
        find_rule(str(file))


def by_rate(facts: Sequence[ItemFacts], _step: int) -> list[float]:
    """As their solve rates; equal if none is known."""
    known = [one.solve_rate or 0.0 for one in facts]
    return known if any(known) else [1.0] * len(facts)


class Noting:
    """A rule that notes the solve rates which it is given."""

    def __init__(self) -> None:
        self.rates: list[float | None] = []

    def __call__(self, facts: Sequence[ItemFacts], _step: int) -> list[float]:
        self.rates = [one.solve_rate for one in facts]
        return [1.0] * len(facts)

    def of(self, stream: ItemStream) -> list[float | None]:
        stream.keep(lambda _: True)  # so that the next draw asks the rule
        stream.next()
        return self.rates


def restored(
    directory: Path,
    parts: Sequence[tuple[Sequence[Item], float]],
    seed: int,
    rule: Rule = learnable,
) -> ItemStream:
    stream = ItemStream(parts, seed, rule)
    CurriculumFiles(directory, stream).restore()
    return stream


def test_the_rule_of_the_example_adds_a_length_once_the_shorter_sums_are_solved() -> None:
    rule = find_rule("examples/mixed_sums.py:short_first")
    assert rule is not None
    facts = [ItemFacts({"digits": digits}, "sums") for digits in (1, 1, 2, 3, 4)]
    assert rule(facts, 0) == [1, 1, 0, 0, 0]
    facts[0].solve_rate = 1.0
    assert rule(facts, 0) == [1, 1, 1, 0, 0]
    for one in facts:
        one.solve_rate = 1.0
    assert rule(facts, 0) == [1, 1, 1, 1, 1]
