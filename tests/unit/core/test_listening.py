"""A server that listens on `::` answers clients of both address families."""

from __future__ import annotations

import socket

import pytest

from grpo_core.listening import family_and_host, listen


def has_ipv6() -> bool:
    """Whether this machine has a loopback address of IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_every_address_is_of_both_families() -> None:
    with listen("::", 0) as listening:
        for host in ["127.0.0.1", *(["::1"] if has_ipv6() else [])]:
            socket.create_connection((host, listening.getsockname()[1])).close()


def test_every_address_is_of_ipv4_on_a_kernel_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    assert family_and_host("::") == (socket.AF_INET, "0.0.0.0")
