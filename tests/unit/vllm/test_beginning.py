"""What a server takes its checkpoint for when it starts."""

from __future__ import annotations

import pytest

from grpo_core.wire import PolicyVersion
from grpo_vllm.beginning import Beginning, begin_after
from grpo_vllm.served_record import ServedWeights

V27 = PolicyVersion(2, 7)
TRAINED = ServedWeights(V27, intact=True, trained=True)
TORN = ServedWeights(V27, intact=False, trained=True)
CHECKPOINT = ServedWeights(PolicyVersion(3, 0), intact=True, trained=False)


@pytest.mark.parametrize(
    ("served", "await_weights", "expected"),
    [
        (None, True, Beginning(PolicyVersion(0, 0))),
        (None, False, Beginning(PolicyVersion(0, 0))),
        (TRAINED, True, Beginning(V27, missing=True)),
        (TORN, True, Beginning(V27, missing=True)),
        (TRAINED, False, Beginning(PolicyVersion(3, 0), new_name=True)),
        (TORN, False, Beginning(PolicyVersion(3, 0), new_name=True)),
        (CHECKPOINT, True, Beginning(PolicyVersion(3, 0))),
        (CHECKPOINT, False, Beginning(PolicyVersion(3, 0))),
    ],
)
def test_beginning(served: ServedWeights | None, await_weights: bool, expected: Beginning) -> None:
    assert begin_after(served, await_weights) == expected


def test_the_checkpoint_gets_a_name_that_no_trainer_has_used() -> None:
    """A trainer names steps within its epoch, and a torn write bumps the epoch by one at most."""
    version = begin_after(TRAINED, await_weights=False).version
    assert version > PolicyVersion(V27.epoch, 10**9)
