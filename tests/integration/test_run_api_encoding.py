"""gzip in both directions. Bodies that are not what they say: `test_run_api_bad_input`."""

from __future__ import annotations

import gzip
import json

import httpx
import pytest

from tests.integration.run_api_calls import group, next_batch, start

BIG_GROUP = json.dumps(group(1, size=4, images="x" * 5000)).encode()
MEMBERS = gzip.compress(BIG_GROUP[:2000]) + gzip.compress(BIG_GROUP[2000:])


@pytest.mark.parametrize(
    ("encoding", "body"), [("gzip", MEMBERS), ("identity, GZip", MEMBERS), ("", BIG_GROUP)]
)
def test_bodies_are_read_in_any_encoding_and_content_type(
    http: httpx.Client, encoding: str, body: bytes
) -> None:
    start(http)
    headers = {"Content-Encoding": encoding, "Content-Type": "text/plain"}
    answer = http.post("/scored_data", content=body, headers=headers)
    assert answer.json() == {"status": "received"}
    assert next_batch(http) == [1]


@pytest.mark.parametrize(
    ("accepted", "encoding"), [("deflate, gzip;q=0.1", "gzip"), ("gzip;q=0, br", None)]
)
def test_long_answers_are_gzip_for_who_accepts_it(
    http: httpx.Client, accepted: str, encoding: str | None
) -> None:
    start(http)
    http.post("/scored_data", content=BIG_GROUP).raise_for_status()
    for path in ("/latest_example", "/batch"):
        answer = http.get(path, headers={"Accept-Encoding": accepted})
        assert answer.headers.get("content-encoding") == encoding
        assert answer.headers["vary"] == "Accept-Encoding"
        assert "x" * 5000 in answer.text
