"""Asks run-api how a run goes. What it does not answer is unknown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from grpo_core.security import authorization

TIMEOUT_S = 2.0


class RunApi:
    """Args:
    url: of run-api
    token: its access token
    """

    def __init__(self, url: str, token: str | None) -> None:
        self._url = url
        self._headers = authorization(token)

    def status(self) -> Mapping[str, Any] | None:
        found: Mapping[str, Any] | None = self._get("/status")
        return found

    def servers(self) -> list[Mapping[str, Any]]:
        return self._get("/servers") or []

    def _get(self, path: str) -> Any:
        try:
            answer = httpx.get(
                self._url + path, headers=self._headers, timeout=TIMEOUT_S, trust_env=False
            )
            return answer.raise_for_status().json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError):
            return None
