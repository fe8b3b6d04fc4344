"""The trainer's HTTP source of published weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from grpo_core.listening import family_and_host
from grpo_core.security import authorization
from grpo_trainer.errors import SourcePortTaken
from grpo_trainer.weight_sync.source import WeightSource

EVERY_ADDRESS = family_and_host("::")[1]
KEY = "secret"
BYTES = bytes(range(256)) * 100


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    version = tmp_path / "served" / "1-2"
    version.mkdir(parents=True)
    (version / "model.safetensors").write_bytes(BYTES)
    (tmp_path / "served" / "notes").mkdir()
    for other in (tmp_path / "secret", tmp_path / "served" / "notes" / "a"):
        other.write_text("secret")
    source = WeightSource(tmp_path / "served", None, 0, SecretStr(KEY))
    file, http = source.open()
    assert file == f"file://{tmp_path}/served"
    yield http
    source.close()


def get(url: str, key: str | None = KEY, **headers: str) -> httpx.Response:
    return httpx.get(url, headers={**authorization(key), **headers})


def test_files_of_versions_are_served_in_ranges(url: str) -> None:
    file = f"{url}/1-2/model.safetensors"
    assert get(file).content == BYTES
    part = get(file, range="bytes=100-199")
    assert (part.status_code, part.content) == (206, BYTES[100:200])


def test_nothing_else_is_served(url: str) -> None:
    for path in ("1-2/absent", "1-2/.hidden", "1-2/..%2f..%2fsecret", "%2e%2e/secret", "notes/a"):
        assert get(f"{url}/{path}").status_code == 404, path
    for key in (None, "wrong"):
        assert get(f"{url}/1-2/model.safetensors", key).status_code == 401


def test_a_port_in_use_is_named_with_the_option(url: str, tmp_path: Path) -> None:
    port = httpx.URL(url).port or 0
    with pytest.raises(SourcePortTaken, match=f"port {port}, .* with --master-port"):
        WeightSource(tmp_path, "trainer", port, None).open()


@pytest.mark.parametrize(
    ("address", "key", "url", "listens_on", "warns"),
    [
        (None, None, "http://127.0.0.1:", "127.0.0.1", False),
        ("localhost", None, "http://localhost:", "127.0.0.1", False),
        ("trainer.example", KEY, "http://trainer.example:", EVERY_ADDRESS, False),
        ("fd00::1", KEY, "http://[fd00::1]:", EVERY_ADDRESS, False),
        ("trainer.example", None, "http://trainer.example:", EVERY_ADDRESS, True),
    ],
)
def test_other_hosts_reach_it_only_if_it_has_an_address(
    address: str | None, key: str | None, url: str, listens_on: str, warns: bool, tmp_path: Path
) -> None:
    """Without an API key, a warning says that anyone can read the weights."""
    source = WeightSource(tmp_path, address, 0, SecretStr(key) if key else None)
    with capture_logs() as logs:
        _file, http = source.open()
    assert http.startswith(url)
    port = httpx.URL(http).port
    listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
    assert [each.ip for each in listening if each.port == port] == [listens_on]
    assert ("weights.unprotected" in {event["event"] for event in logs}) == warns
    source.close()
