"""Checks over HTTP if a service is ready. A service that does not answer counts as not ready."""

from __future__ import annotations

from typing import Any

import httpx

from grpo_core.security import authorization

PROBE_TIMEOUT_S = 1.0
NOT_REGISTERED = -1
"""`batch_size` of run-api's `/info` before a trainer has registered."""


class HealthProbe(httpx.Client):
    """One connection pool for all checks. Proxies are not used, since every service is local.

    Args:
        token: the token that run-api requires
        timeout_s: for an answer
    """

    def __init__(self, token: str | None = None, timeout_s: float = PROBE_TIMEOUT_S) -> None:
        super().__init__(timeout=timeout_s, trust_env=False, headers=authorization(token))

    def answers(self, base_url: str) -> bool:
        """`GET /health` is 200."""
        return self._status(base_url) == httpx.codes.OK

    def responds(self, base_url: str) -> bool:
        """`GET /health` has any answer. An inference server that waits until a trainer has written
        its weights back answers 503, so the trainer's start must not wait for 200."""
        return self._status(base_url) is not None

    def trainer_is_registered(self, run_api_url: str) -> bool:
        info = self.get_json(f"{run_api_url}/info")
        return isinstance(info, dict) and info.get("batch_size", NOT_REGISTERED) != NOT_REGISTERED

    def has_environment(self, run_api_url: str, name: str) -> bool:
        """True if an environment with this name has registered. run-api appends a number to it."""
        environments = self.get_json(f"{run_api_url}/environments")
        return isinstance(environments, list) and any(
            str(environment.get("name")).rpartition("_")[0] == name for environment in environments
        )

    def _status(self, base_url: str) -> int | None:
        try:
            return self.get(f"{base_url}/health").status_code
        except httpx.RequestError:
            return None

    def get_json(self, url: str) -> Any:
        """The content; None without an answer of status 2xx."""
        try:
            return self.get(url).raise_for_status().json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError):
            return None
