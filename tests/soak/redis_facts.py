"""What Redis says about its append-only file: looked up before it is killed."""

from __future__ import annotations

import redis
from pydantic import BaseModel, ConfigDict
from redis.backoff import NoBackoff
from redis.retry import Retry

_DEADLINE_S = 1.0


class AofState(BaseModel):
    """Of `INFO persistence`. A background fsync that is pending holds back writes of everysec."""

    model_config = ConfigDict(extra="ignore")

    aof_pending_bio_fsync: int = 0
    aof_delayed_fsync: int = 0
    aof_buffer_length: int = 0
    aof_current_size: int = 0
    aof_rewrite_in_progress: int = 0


_CUT_TAIL = "AOF loaded anyway because aof-load-truncated is enabled"


def aof_tails_cut(log: str) -> int:
    """How often Redis started on a file whose last command was not written whole."""
    return log.count(_CUT_TAIL)


def aof_state(port: int) -> AofState | None:
    """None where Redis does not answer at this moment."""
    at_once = Retry(NoBackoff(), retries=0)
    with redis.Redis(port=port, socket_timeout=_DEADLINE_S, retry=at_once) as client:
        try:
            return AofState.model_validate(client.info("persistence"))
        except redis.RedisError:
            return None
