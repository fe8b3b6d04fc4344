"""Whatever the live page is asked, it answers with what it has or a refusal."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from grpo_runs.watch.api import watch_app
from tests.unit.runs.watch.written_runs import WrittenRun

ROUTES = (
    *("/api/runs/{}", "/api/runs/mine/curves?x={}", "/api/runs/mine/curves?points={}"),
    *("/api/runs/mine/steps/{}", "/api/runs/mine/steps/2/origin?group=0&index={}"),
    *("/api/runs/mine/steps/{}/origin?group=1&index=0", "/api/differences?run=run&run={}"),
    *("/{}", "/?{}", "/{}?token=secret", "/?token={}"),
)
ODD = st.one_of(
    st.sampled_from(["run", "2", "-1", "9" * 30, "9" * 5000, "nan", "", "..", "a\r\nb: c", "\0"]),
    st.text(max_size=20),
)
HEADERS = st.dictionaries(
    st.sampled_from(["authorization", "cookie", "host", "origin", "referer", "sec-fetch-site"]),
    st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f")),
    max_size=2,
)


@pytest.mark.parametrize("token", [None, "secret"])
def test_no_request_is_a_fault(run: WrittenRun, token: str | None) -> None:
    secret = None if token is None else SecretStr(token)
    client = TestClient(watch_app([run.live], secret), "http://127.0.0.1", follow_redirects=False)

    @settings(max_examples=settings.default.max_examples // 2)
    @given(st.sampled_from(ROUTES), ODD, HEADERS)
    def check(route: str, odd: str, headers: dict[str, str]) -> None:
        client.cookies.clear()
        encoded = {name: value.encode("latin-1") for name, value in headers.items()}
        answer = client.get(route.format(quote(odd, safe="")), headers=encoded)  # type: ignore[arg-type]
        assert answer.status_code < 500, answer.text
        assert all(character.isprintable() for character in answer.headers.get("location", ""))

    check()
