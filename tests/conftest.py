"""Fixtures live in `tests/fixtures/`, one file per service."""

from __future__ import annotations

import functools
import gc
import os
import signal
import ssl
from collections.abc import Generator
from types import FrameType
from typing import Any

import httpx
import hypothesis
import pytest

pytest_plugins = [
    # In the order in which they import each other.
    "tests.fixtures.inference",
    "tests.fixtures.redis",
    "tests.fixtures.run_api",
    "tests.fixtures.file_sync",
]

EXCUSED_SKIPS = ("no GPU", "no GSM8K data", "bwrap cannot make namespaces here")
"""Starts of reasons that CI cannot do anything about. Any other skip there is a failure."""

HTTP_DEADLINE_S = 60.0
"""Of requests without one of their own, which httpx gives five seconds: a machine with other work
may stand still as long, and no test means to find that."""


# No property depends on the clock. `make test` tries the same examples each time; `make test-full`
# new ones, ten times as many.
_UNTIMED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("test", derandomize=True, database=None, **_UNTIMED)
hypothesis.settings.register_profile("full", max_examples=1000, **_UNTIMED)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "test"))


def pytest_configure() -> None:
    """Asked to end, the tests end as after Ctrl-C: fixtures end what they have started."""
    gc.disable()  # until all is imported, and stays: to look through it takes seconds
    signal.signal(signal.SIGTERM, _interrupt)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the hub for its model
    for part in ("connect", "read", "write", "pool"):
        setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, part, HTTP_DEADLINE_S)
    httpx._transports.default.create_ssl_context = _ssl_context


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def _ssl_context(verify: ssl.SSLContext | bool = True, **options: Any) -> ssl.SSLContext:
    """For each `httpx.get`, httpx reads all certificates again: 30 ms of CPU time, and tests that
    wait for an event ask many times a second."""
    if verify is not True or options != {"cert": None, "trust_env": True}:
        return httpx.create_ssl_context(verify, **options)
    return _default_ssl_context(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@functools.cache
def _default_ssl_context(*_variables: str | None) -> ssl.SSLContext:
    return httpx.create_ssl_context()


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)  # make passes on what the group got already
    raise KeyboardInterrupt


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Before anybody counts the report: a skip that is not excused is a failure in CI."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not reason.removeprefix("Skipped: ").startswith(EXCUSED_SKIPS):
            report.outcome = "failed"
            report.longrepr = f"skipped in CI, which could have run it: {reason}"
    return report
