from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from grpo_env.tasks import KeptItems
from grpo_env.tasks.shuffled import Shuffled

COUNTS, SEEDS = st.integers(1, 40), st.integers()


def take(stream: Shuffled[int], count: int) -> list[int]:
    return [stream.next() for _ in range(count)]


@given(COUNTS, SEEDS)
def test_every_epoch_holds_every_item_once(count: int, seed: int) -> None:
    stream = Shuffled(range(count), seed)
    for _ in range(3):
        assert sorted(take(stream, count)) == list(range(count))


def test_the_seed_and_the_epoch_decide_the_order() -> None:
    def draw(seed: int) -> list[int]:
        return take(Shuffled(range(50), seed), 120)

    assert draw(1) == draw(1) != draw(2)
    assert draw(1)[:50] != draw(1)[50:100]


@given(COUNTS, SEEDS, st.data())
def test_what_does_not_fit_never_comes_again_not_even_in_this_epoch(
    count: int, seed: int, data: st.DataObject
) -> None:
    stream = Shuffled(range(count), seed)
    seen = take(stream, data.draw(st.integers(0, count)))
    fitting = data.draw(st.sets(st.integers(0, count - 1), min_size=1))

    assert stream.keep(fitting.__contains__) == KeptItems(len(fitting), count - len(fitting))

    rest = fitting - set(seen) if len(seen) < count else set()
    assert set(take(stream, len(rest))) == rest
    assert set(take(stream, len(fitting))) == fitting
