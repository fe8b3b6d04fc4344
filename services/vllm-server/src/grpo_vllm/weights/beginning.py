"""What a server that starts takes its weights for: a pure decision on what the run was served."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_core.wire import PolicyVersion
from grpo_vllm.forkserver.protocol import UNTRAINED
from grpo_vllm.weights.served_store import ServedWeights


@dataclass(frozen=True)
class Beginning:
    """`version` names what the engine holds or, where that is `missing`, what it should hold.

    `new_name`: the version was made up now, so the record must learn it.
    """

    version: PolicyVersion
    missing: bool = False
    new_name: bool = False


def begin_after(served: ServedWeights | None, await_weights: bool) -> Beginning:
    """Args:
    served: what the run was served last, None for nothing
    await_weights: hold requests until a trainer has written that back
    """
    if served is None:
        return Beginning(UNTRAINED)
    if not served.trained:
        return Beginning(served.version)
    if await_weights:
        return Beginning(served.version, missing=True)
    # The checkpoint again, in the middle of a run: a name that no trainer has used.
    return Beginning(PolicyVersion(served.version.epoch + 1, 0), new_name=True)
