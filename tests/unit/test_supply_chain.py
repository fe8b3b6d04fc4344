"""What `make supply-chain` makes of the answers of package indexes and of Debian."""

from __future__ import annotations

from typing import Any

import pytest

from docs.generate import supply_chain
from docs.generate.image_packages import newer
from docs.generate.supply_chain import Audit, locked, newest_records, vulnerabilities_section
from tests.support.http_stub import stub_server


def record(version: str, *, withdrawn: str | None = None) -> Any:
    known = {"id": "PYSEC-1", "fixed_in": ["3"], "withdrawn": withdrawn}
    return lambda _: (200, {"info": {"version": version}, "vulnerabilities": [known]})


def test_the_configured_index_is_asked_and_only_the_record_of_the_used_version_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    routes = {
        "GET /pypi/used/json": record("2"),
        "GET /pypi/withdrawn/json": record("2", withdrawn="2026-01-01"),
        "GET /pypi/older/json": record("3"),
        "GET /pypi/unknown/json": lambda _: (404, {}),
    }
    with stub_server(routes) as server:
        monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
        found = newest_records(dict.fromkeys(("used", "withdrawn", "older", "unknown"), "2"))
    assert found == {"used": [{"id": "PYSEC-1", "fix_versions": ["3"]}], "withdrawn": []}


def test_the_page_names_what_was_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supply_chain, "_version", lambda _: "tool 1")
    found = Audit([("a", "1", "PYSEC-1", "2")], ["b", "c"], 5)
    text = "\n".join(vulnerabilities_section(found, supply_chain.ROOT))
    assert "tool 1: of 7 packages, 5 were checked, and 1 of these have" in text
    assert "| a | 1 | PYSEC-1 | 2 |" in text
    assert "in another one: b, c." in text


def test_every_package_of_the_lock_has_one_version() -> None:
    found = locked()
    assert {"torch", "numpy", "huggingface-hub", "pyyaml"} <= found.keys()


def test_what_debian_would_replace() -> None:
    said = (
        "Debian GNU/Linux 12\nInst openssl [3.0.20-1~deb12u2] (3.0.22-1~deb12u2 Debian-Security:12 "
        "[amd64]) []\nInst new (1.0 Debian:12 [all])\nConf openssl (3.0.22-1~deb12u2 Debian)\n"
    )
    assert newer(said) == ["openssl 3.0.20-1~deb12u2 → 3.0.22-1~deb12u2"]
