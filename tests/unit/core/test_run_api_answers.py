"""How the trainer's client reads run-api's answer to a poll."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_core.errors import ProtocolViolation
from grpo_core.run_api_answers import leased_batch
from grpo_core.wire import PolicyVersion

GROUP = {"tokens": [[5, 6]], "masks": [[-100, 6]], "scores": [1.0]}
ANSWER = {"batch_id": 4, "received_under": [[1, 7], None], "batch": [GROUP] * 2}


def test_each_group_comes_with_the_version_it_was_received_under() -> None:
    batch = leased_batch(ANSWER, after=3)
    assert batch is not None
    assert (batch.id, len(batch.groups)) == (4, 2)
    assert batch.received_under == [PolicyVersion(1, 7), None]
    assert leased_batch({"batch": None}, after=3) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"received_under": None}, "run-api of the trainer's version"),
        ({"received_under": [[1, 7]]}, "2 groups, received under 1 versions"),
        ({"received_under": [[1, 7], ["x", 1]]}, "run-api of the trainer's version"),
        ({"batch_id": 3}, "asked for the batch after 3, it answered batch 3"),
        ({"batch": [GROUP, {}]}, "broken group in batch 4"),
        ({"status": "error", "message": "Who?"}, "Who?.*reset_data"),
    ],
)
def test_an_answer_that_breaks_the_contract_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ProtocolViolation, match=says):
        leased_batch(ANSWER | changes, after=3)
