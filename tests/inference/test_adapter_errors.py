"""An adapter that is not loaded is refused for good, or may be sent again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.http.in_flight import InFlight

# vLLM's modules warn when they are first imported, which may be here.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

FOR_GOOD, TRY_AGAIN = 409, 503


class Engine:
    """Fails with `error` when it loads an adapter."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def add_lora(self, _request: Any) -> None:
        raise self.error

    async def remove_lora(self, _number: int) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "name", "status"),
    [
        (ValueError("rank 99"), "AdapterRefused", FOR_GOOD),
        (TimeoutError(), "EngineTimeout", TRY_AGAIN),
    ],
)
async def test_a_timeout_is_no_refusal(error: Exception, name: str, status: int) -> None:
    from grpo_vllm.routes.errors import STATUS
    from grpo_vllm.weights.lora import AdapterSwitch

    adapters = AdapterSwitch(Engine(error), "model", InFlight())
    with pytest.raises(tuple(STATUS)) as raised:
        await adapters.load(Path("/adapter"), PolicyVersion(1, 1))
    assert raised.typename == name
    assert adapters.current is None
    assert STATUS[raised.type] == status
