"""What the server's supervisor says of itself in Redis."""

from __future__ import annotations

import redis

from grpo_core.weights.supervisor_protocol import SupervisorStatus, status_key

REDIS_TIMEOUT_S = 5.0


def server_status(redis_url: str, run_id: str) -> SupervisorStatus | None:
    """The newest status; None where no supervisor has said anything, or Redis does not answer.

    Raises:
        ProtocolViolation: what stands there is no status.
    """
    with redis.Redis.from_url(
        redis_url, socket_timeout=REDIS_TIMEOUT_S, decode_responses=True
    ) as client:
        try:
            fields = client.hgetall(status_key(run_id))
        except redis.RedisError:
            return None
    return SupervisorStatus.from_wire(fields) if fields else None
