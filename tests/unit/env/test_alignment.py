from __future__ import annotations

import math

import pytest

from grpo_core.inference_client import Completion
from grpo_core.wire import PolicyVersion
from grpo_env.alignment import MisalignedCompletion, align_group

VERSION = PolicyVersion(0, 0)


def completion(token_ids: list[int], logprobs: list[float]) -> Completion:
    return Completion("", "stop", token_ids, logprobs, VERSION, VERSION)


def test_prompt_is_masked_and_completion_carries_its_own_tokens_and_logprobs() -> None:
    rows = align_group([5, 6, 7], [completion([90, 91], [-0.4, -1.2]), completion([92], [-3.0])])

    assert rows[0].tokens == [5, 6, 7, 90, 91]
    assert rows[0].masks == [-100, -100, -100, 90, 91]
    assert rows[0].inference_logprobs == [1.0, 1.0, 1.0, -0.4, -1.2]
    assert rows[1].tokens == [5, 6, 7, 92]
    assert rows[1].masks == [-100, -100, -100, 92]
    assert rows[1].inference_logprobs == [1.0, 1.0, 1.0, -3.0]


def test_rounding_above_zero_is_accepted() -> None:
    assert align_group([1], [completion([2], [5e-7])])[0].inference_logprobs == [1.0, 5e-7]


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf, 1e-5, 1.0])
def test_an_impossible_logprob_is_named_with_its_place(logprob: float) -> None:
    with pytest.raises(MisalignedCompletion, match=f"completion 1: logprob {logprob} at token 1"):
        align_group([1], [completion([2], [-0.1]), completion([3, 4], [-0.1, logprob])])


def test_every_problem_is_listed_at_once() -> None:
    with pytest.raises(MisalignedCompletion) as caught:
        align_group([], [completion([2, 3], [-0.1]), completion([], []), completion([4], [0.5])])

    message = str(caught.value)
    assert "the prompt has no tokens" in message
    assert "completion 0: 1 logprobs for 2 tokens" in message
    assert "completion 1: no tokens" in message
    assert "completion 2: logprob 0.5 at token 0" in message
