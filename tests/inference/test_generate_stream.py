"""`POST /generate` with `"stream": true`: JSON lines that a client of the archived server reads."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import httpx
import pytest

from grpo_core.clients.inference import GenerateAnswer
from tests.fixtures.inference import InferenceServer
from tests.inference.engine_load import (
    MOST_RUNNING,
    generated_tokens,
    running_sequences,
    unfinished_sequences,
)
from tests.support.wait import wait_for

PROMPT_TEXT = "&'()"
DEFAULTS: dict[str, Any] = {
    "prompt": {"prompt_token_ids": [5, 6, 7, 8]},
    "max_tokens": 10,
    "ignore_eos": True,
    "stream": True,
}
ENDLESS = {"max_tokens": 500, "n": 1024}
"""A request that takes minutes, because the engine runs 64 sequences at once."""
ENDLESS_TOKENS = 500 * 1024


@contextmanager
def streamed(server: InferenceServer, **body: Any) -> Iterator[httpx.Response]:
    with httpx.stream("POST", f"{server.url}/generate", json=DEFAULTS | body) as response:
        yield response


def lines_of(server: InferenceServer, **body: Any) -> list[dict[str, Any]]:
    with streamed(server, **body) as response:
        response.raise_for_status()
        assert response.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in response.iter_lines()]


def test_each_line_has_prompt_and_text_so_far_of_every_completion(
    shared_server: InferenceServer,
) -> None:
    lines = lines_of(shared_server, n=3, max_tokens=500)
    assert len(lines) > 2  # about one line per token, but far fewer on a busy machine
    for earlier, later in pairwise(lines):
        assert len(earlier["text"]) == len(later["text"]) == 3
        for before, after in zip(earlier["text"], later["text"], strict=True):
            assert before.startswith(PROMPT_TEXT)
            # An incomplete character appears when all of its bytes are sampled.
            assert after.startswith(before.rstrip("\ufffd"))
    assert all(set(line) == {"text"} for line in lines[:-1])


def test_the_last_line_is_a_whole_answer_with_the_prompt_before_the_text(
    shared_server: InferenceServer,
) -> None:
    prompt = "1+2="
    body = {"prompt": prompt, "temperature": 0, "logprobs": 2, "prompt_logprobs": 0}
    last = lines_of(shared_server, **body)[-1]
    whole = DEFAULTS | body | {"stream": False}
    plain = httpx.post(f"{shared_server.url}/generate", json=whole).json()
    assert last["text"] == [prompt + plain["text"][0]]
    assert set(last) == set(plain)
    for name in ("finish_reasons", "token_ids", "prompt_token_ids", "policy_version", "prompt"):
        assert last[name] == plain[name]
    streamed_completion, completion = (
        GenerateAnswer.model_validate(answer).completions()[0] for answer in (last, plain)
    )
    assert streamed_completion.logprobs == pytest.approx(completion.logprobs, abs=1e-4)


@pytest.mark.parametrize("stream", [True, False])
def test_a_dropped_connection_ends_the_request_in_the_engine(
    shared_server: InferenceServer, stream: bool
) -> None:
    before = generated_tokens(shared_server)
    body = json.dumps(DEFAULTS | ENDLESS | {"stream": stream}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    port = httpx.URL(shared_server.url).port
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head + body)
        wait_for(lambda: running_sequences(shared_server) == MOST_RUNNING)
        if stream:
            assert b"200" in connection.recv(64)  # it began while the engine was still sampling
    wait_for(lambda: unfinished_sequences(shared_server) == 0)
    assert generated_tokens(shared_server) - before < ENDLESS_TOKENS


def test_a_wrong_request_gets_its_status_and_no_stream(shared_server: InferenceServer) -> None:
    """Refused by the engine after the request started."""
    with streamed(shared_server, structured_outputs={"regex": "("}) as response:
        assert response.status_code == 400
        assert "detail" in json.loads(response.read())
