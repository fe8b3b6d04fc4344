"""A health check for containers: exits with 0 if a URL answers 2xx.

Usage: `python -m grpo_core.clients.health_probe URL`. It runs every few seconds, so it imports only
the standard library.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

EXIT_USAGE = 2
TIMEOUT_S = 4.0
SUCCESS = range(200, 300)


def problem(url: str) -> str | None:
    """Why the URL is unhealthy; None if it is healthy."""
    parts = urlsplit(url)
    # Not urllib, which would use the proxy configured for the service's own requests.
    connection = HTTPConnection(parts.hostname or "", parts.port or 80, timeout=TIMEOUT_S)
    try:
        connection.request("GET", parts.path or "/")
        status = connection.getresponse().status
    except (OSError, HTTPException) as error:
        return f"{url}: {type(error).__name__}: {error}"
    finally:
        connection.close()
    return None if status in SUCCESS else f"{url} answered {status}"


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1 or urlsplit(argv[0]).scheme != "http":
        sys.stderr.write("usage: python -m grpo_core.clients.health_probe http://HOST:PORT/PATH\n")
        return EXIT_USAGE
    found = problem(argv[0])
    if found:
        sys.stderr.write(found + "\n")
    return int(found is not None)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
