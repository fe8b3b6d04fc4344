"""The version of this release, and of what its services send to each other.

Every answer of run-api and of the inference server has the protocol in a header, and every client
compares it with its own. Other servers, such as plain vLLM, have no such header.
"""

from __future__ import annotations

from pathlib import Path

from grpo_core.errors import OtherProtocol

VERSION = (Path(__file__).parent / "VERSION").read_text(encoding="utf-8").strip()

PROTOCOL = 1
"""Increase it if a service of this version cannot work with the other services of the version
before. A new route, or a new field with a default, needs no increase."""
PROTOCOL_HEADER = ("grpo-protocol", f"{PROTOCOL}, grpo {VERSION}")


def require_same_protocol(header: str | None, service: str) -> None:
    """Compare the `header` of a service's answer with ours; None if the answer has none.

    Raises:
        OtherProtocol: the service is of a version that does not work with this one.
    """
    if header is not None and header.split(",")[0] != str(PROTOCOL):
        raise OtherProtocol(
            f"{service} has protocol {header}, but this program has protocol {PROTOCOL_HEADER[1]}: "
            "they do not work together. Stop the run, and start all services of it with one "
            "release"
        )
