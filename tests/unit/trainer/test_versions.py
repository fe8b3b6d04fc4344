"""Which version a trainer announces to a server that it attached to again."""

from __future__ import annotations

import pytest

from grpo_core.inference_client import BridgeInfo
from grpo_core.wire import PolicyVersion
from grpo_trainer.weight_sync.shared_vllm import _usable_after

OURS = PolicyVersion(3, 7)


def info(version: tuple[int, int], state: str) -> BridgeInfo:
    return BridgeInfo(
        policy_version=version, paused=False, weights_intact=True, weights_socket="s", state=state
    )


@pytest.mark.parametrize(
    ("state", "served", "expected"),
    [
        # The restarted server waits for the version that it lost.
        ("awaiting_weights", (3, 7), (3, 7)),
        ("failed", (3, 7), (3, 7)),
        # It did not learn of the last publication, or knows nothing of the run.
        ("awaiting_weights", (3, 6), (3, 7)),
        ("serving", (0, 0), (3, 7)),
        # The pause was abandoned under a name of its own, then the server restarted.
        ("awaiting_weights", (4, 7), (5, 7)),
        ("serving", (4, 7), (5, 7)),
        # It lives, under the name that could not be used twice.
        ("serving", (3, 7), (4, 7)),
    ],
)
def test_the_version_after_a_return(
    state: str, served: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert _usable_after(OURS, info(served, state)) == expected
