"""What cannot be trained on is refused. `test_rollout.py` shows the layout of what can."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.inference_client import Completion
from grpo_core.wire import PolicyVersion
from grpo_env.alignment import MisalignedCompletion, align_group

VERSION = PolicyVersion(0, 0)
IMPOSSIBLE = st.just(math.nan) | st.just(-math.inf) | st.floats(min_value=1e-5)


def completion(token_ids: list[int], logprobs: list[float]) -> Completion:
    return Completion("", "stop", token_ids, logprobs, VERSION, VERSION)


@given(good=st.lists(st.floats(max_value=1e-6, allow_infinity=False)), bad=IMPOSSIBLE)
def test_an_impossible_logprob_is_named_with_its_place(good: list[float], bad: float) -> None:
    """Rounding may lift a log-probability to 1e-6 above 0."""
    broken = completion([3] * (len(good) + 1), [*good, bad])
    with pytest.raises(MisalignedCompletion) as caught:
        align_group([1], [completion([2], [-0.1]), broken])
    assert str(caught.value).endswith(
        f"be trained on: completion 1: logprob {bad} at token {len(good)}"
    )


def test_every_problem_is_listed_at_once() -> None:
    with pytest.raises(MisalignedCompletion) as caught:
        align_group([], [completion([2, 3], [-0.1]), completion([], []), completion([4], [0.5])])

    message = str(caught.value)
    assert "the prompt has no tokens" in message
    assert "completion 0: 1 logprobs for 2 tokens" in message
    assert "completion 1: no tokens" in message
    assert "completion 2: logprob 0.5 at token 0" in message
