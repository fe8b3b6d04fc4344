"""What a trainer makes of the answer to its poll."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_core.errors import ProtocolViolation
from grpo_core.run_api_answers import leased_batch
from grpo_core.wire import PolicyVersion

GROUP = {"tokens": [[5, 6]], "masks": [[-100, 6]], "scores": [1.0]}


def answer(**changes: Any) -> dict[str, Any]:
    return {"batch_id": 4, "received_under": [[1, 7], None], "batch": [GROUP] * 2} | changes


def test_each_group_comes_with_the_version_it_was_received_under() -> None:
    batch = leased_batch(answer(), after=3)
    assert batch is not None
    assert (batch.id, len(batch.groups)) == (4, 2)
    assert batch.received_under == [PolicyVersion(1, 7), None]
    assert leased_batch({"batch": None}, after=3) is None


@pytest.mark.parametrize(
    ("under", "says"),
    [
        (None, "run-api of the trainer's version"),
        ([[1, 7]], "2 groups, received under 1 versions"),
        ([[1, 7], [1]], "run-api of the trainer's version"),
        ([[1, 7], ["x", 1]], "run-api of the trainer's version"),
    ],
)
def test_versions_that_do_not_belong_to_the_groups_are_refused(under: Any, says: str) -> None:
    with pytest.raises(ProtocolViolation, match=says):
        leased_batch(answer(received_under=under), after=3)
