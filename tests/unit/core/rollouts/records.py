"""Records of rollouts for tests."""

from __future__ import annotations

from typing import Any

from grpo_core.rollouts.record import RolloutRecord


def record(**changes: Any) -> RolloutRecord:
    """Prompt 5 6, completion 7 8."""
    fields: dict[str, Any] = {
        **{"step": 1, "group": 0, "index": 0, "env_id": 3, "task": "sums", "item": "ab12"},
        "messages": [
            {"role": "user", "content": "1 + 2?"},
            {"role": "assistant", "content": "3"},
        ],
        **{"tokens": [5, 6, 7, 8], "mask": [0, 0, 1, 1]},
        **{"behaviour_logprobs": [-0.25, -1.5], "logprobs": [-0.5, -1.0]},
        **{"score": 1.0, "parts": {"accuracy": 1.0}, "reason": "equal", "advantage": 0.5},
        **{"versions": [[1, 0], [1, 0]], "staleness": 0, "finish_reason": "stop"},
        **{"temperature": 1.0, "completion_tokens": 2},
    }
    return RolloutRecord(**fields | changes)
