"""Says at start what Redis does with the run when it is restarted."""

from __future__ import annotations

import structlog
from redis.exceptions import ResponseError

from grpo_api.errors import StoreUnavailable
from grpo_api.http.lifetime import Lifetime
from grpo_api.store.redis import RedisLink

_AGAIN_S = 5.0
_log = structlog.get_logger()


async def report_persistence(link: RedisLink, lifetime: Lifetime) -> None:
    """Log how Redis writes to disk, once it answers; nothing where it does not tell."""
    settings = await _append_settings(link, lifetime)
    appendfsync = settings.get("appendfsync")
    match settings.get("appendonly"):
        case "yes":
            _log.info("Redis writes the run to disk", appendfsync=appendfsync)
        case "no":
            _log.warning(
                "Redis runs without appendonly: a restart of Redis forgets the run; "
                "start it with --appendonly yes"
            )


async def _append_settings(link: RedisLink, lifetime: Lifetime) -> dict[str, str]:
    """Empty where Redis refuses to tell, as managed ones do, or where the server stops first."""
    while not lifetime.closing.is_set():
        try:
            flat: list[bytes] = await link.call("CONFIG", "GET", "append*")
        except ResponseError:
            break
        except StoreUnavailable:
            await lifetime.closes_within(_AGAIN_S)
        else:
            words = [word.decode() for word in flat]
            return dict(zip(words[::2], words[1::2], strict=True))
    return {}
