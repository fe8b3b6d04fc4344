"""Exact sums, compared with all sums there are. Which groups are chosen: `test_batching`."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from grpo_api.exact_sums import Stock, can_make

STOCKS = st.lists(
    st.builds(Stock, st.integers(1, 6), st.integers(0, 3), st.integers(0, 7)), max_size=3
)


@given(stocks=STOCKS)
def test_stocks_make_exactly_the_sums_of_numbers_within_their_limits(stocks: list[Stock]) -> None:
    numbers = product(*(range(stock.least, stock.most + 1) for stock in stocks))
    sums = {sum(n * s.sequences for n, s in zip(ns, stocks, strict=True)) for ns in numbers}
    assert {total for total in range(130) if can_make(total, stocks)} == sums
