"""Plugin for the tests that atroposlib ships: what they send to port 8000 goes to RUN_API_URL.

They start a server of their own there as well. It does not come up, since this installation has no
uvicorn, and they take the one that answers.
"""

from __future__ import annotations

import os
from typing import Any

import requests

WRITTEN_INTO_THE_TESTS = "http://localhost:8000"

_request = requests.Session.request


def _redirected(session: requests.Session, method: str, url: str, **options: Any) -> Any:
    target = url.replace(WRITTEN_INTO_THE_TESTS, os.environ["RUN_API_URL"])
    return _request(session, method, target, **options)


requests.Session.request = _redirected
