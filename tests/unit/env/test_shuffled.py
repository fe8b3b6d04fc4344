from __future__ import annotations

from grpo_env.tasks import KeptItems
from grpo_env.tasks.shuffled import Shuffled


def take(stream: Shuffled[int], count: int) -> list[int]:
    return [stream.next() for _ in range(count)]


def test_every_epoch_holds_every_item_once_and_in_an_order_of_its_own() -> None:
    stream = Shuffled(range(50), seed=0)
    epochs = [take(stream, 50) for _ in range(3)]

    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_seed_decides_the_order() -> None:
    def draw(seed: int) -> list[int]:
        return take(Shuffled(range(50), seed), 120)

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_what_does_not_fit_never_comes_again_not_even_in_this_epoch() -> None:
    stream = Shuffled(range(10), seed=0)
    seen = take(stream, 4)

    assert stream.keep(lambda item: item % 2 == 0) == KeptItems(kept=5, skipped=5)

    rest = [item for item in range(0, 10, 2) if item not in seen]
    assert sorted(take(stream, len(rest))) == rest
    assert sorted(take(stream, 5)) == [0, 2, 4, 6, 8]
