"""`POST /generate` with `"stream": true`: JSON lines that a client of the archived server reads."""

from __future__ import annotations

import asyncio
import json
import time
import warnings
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any

import httpx
import pytest
from starlette.types import Message

from grpo_core.inference_client import GenerateAnswer
from tests.fixtures.inference import InferenceServer
from tests.inference.engine_load import in_time, running_requests, unfinished_after_steps

DEFAULTS: dict[str, Any] = {
    "prompt": {"prompt_token_ids": [5, 6, 7, 8]},
    "max_tokens": 10,
    "ignore_eos": True,
    "stream": True,
}
PROMPT_TEXT = "&'()"


@contextmanager
def streamed(server: InferenceServer, **body: Any) -> Iterator[httpx.Response]:
    with httpx.stream(
        "POST", f"{server.url}/generate", json=DEFAULTS | body, timeout=60
    ) as response:
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
    assert len(lines) > 2  # about one per token, far fewer where the machine is busy
    for earlier, later in pairwise(lines):
        assert len(earlier["text"]) == len(later["text"]) == 3
        for before, after in zip(earlier["text"], later["text"], strict=True):
            assert before.startswith(PROMPT_TEXT)
            # An unfinished character is shown once all of its bytes are there.
            assert after.startswith(before.rstrip("\ufffd"))
    assert all(set(line) == {"text"} for line in lines[:-1])


def test_the_last_line_is_a_whole_answer_with_the_prompt_before_the_text(
    shared_server: InferenceServer,
) -> None:
    prompt = "1+2="
    body = {"prompt": prompt, "temperature": 0, "logprobs": 2, "prompt_logprobs": 0}
    last = lines_of(shared_server, **body)[-1]
    plain = httpx.post(
        f"{shared_server.url}/generate", json=DEFAULTS | body | {"stream": False}, timeout=60
    ).json()
    assert last["text"] == [prompt + plain["text"][0]]
    GenerateAnswer.model_validate(last).completions()
    for name in ("finish_reasons", "token_ids", "prompt_token_ids", "policy_version", "prompt"):
        assert last[name] == plain[name]
    for name in ("logprobs", "prompt_logprobs"):
        assert set(last) == set(plain)
        assert str(last[name])[:5] == str(plain[name])[:5]
        assert len(last[name]) == len(plain[name])


def test_stop_strings_end_a_stream_and_stay_out_of_it(shared_server: InferenceServer) -> None:
    lines = lines_of(shared_server, logit_bias={"5": 100}, stop=["&&&"], max_tokens=50)
    assert lines[-1]["finish_reasons"] == ["stop"]
    assert lines[-1]["text"] == [PROMPT_TEXT]
    assert all(line["text"] == [PROMPT_TEXT] for line in lines)


def test_lines_arrive_while_the_engine_still_samples(shared_server: InferenceServer) -> None:
    lines = in_time(lambda: lines_read_meanwhile(shared_server))
    assert "finish_reasons" not in lines[0]
    assert "finish_reasons" in lines[-1]


def lines_read_meanwhile(server: InferenceServer) -> list[dict[str, Any]] | None:
    """None where the engine had sampled everything before one was read."""
    with streamed(server, max_tokens=500, n=16) as response:
        lines = response.iter_lines()
        read = list(until(lambda: running_requests(server) > 0, lines))
        rest = list(lines)
    return [json.loads(line) for line in (*read, *rest)] if rest else None


def until(seen: Callable[[], bool], lines: Iterator[str]) -> Iterator[str]:
    """Those up to the one after which it is seen; all of them where it never is."""
    for line in lines:
        yield line
        if seen():
            return


def test_leaving_in_the_middle_aborts_in_the_engine(shared_server: InferenceServer) -> None:
    assert in_time(lambda: left_in_the_middle(shared_server))
    assert unfinished_after_steps(shared_server) < 16


def left_in_the_middle(server: InferenceServer) -> bool | None:
    """None where the engine had sampled everything before."""
    with streamed(server, max_tokens=500, n=32) as response:
        *_, last = until(lambda: running_requests(server) == 32, response.iter_lines())
    return "finish_reasons" not in json.loads(last) or None


def test_a_slow_reader_gets_the_whole_text(
    shared_server: InferenceServer,
) -> None:
    """What is sampled while nobody reads comes with the next line, and is not lost."""
    with streamed(shared_server, max_tokens=500, n=16) as response:
        time.sleep(1.0)
        lines = [json.loads(line) for line in response.iter_lines()]
    assert lines[-1]["finish_reasons"] == ["length"] * 16
    assert [len(tokens) for tokens in lines[-1]["token_ids"]] == [500] * 16


@pytest.mark.parametrize(
    "body", [{"max_tokens": 0}, {"prompt": ""}, {"structured_outputs": {"regex": "("}}]
)
def test_a_wrong_request_gets_its_status_and_no_stream(
    shared_server: InferenceServer, body: dict[str, Any]
) -> None:
    with streamed(shared_server, **body) as response:
        assert response.status_code == 400
        assert "detail" in json.loads(response.read())


@pytest.fixture(scope="module")
def json_lines_module() -> ModuleType:
    """Importing vLLM warns about its own dependencies; that is not ours to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from grpo_vllm import json_lines

    return json_lines


async def test_a_generation_that_fails_ends_without_the_end_mark(
    json_lines_module: ModuleType,
) -> None:
    """On an engine that fails on demand. `test_bridge_restart` kills a real one."""
    from grpo_vllm.generation import GenerationFailed

    async def rest() -> AsyncGenerator[bytes, None]:
        yield b'{"text": ["b"]}\n'
        raise GenerationFailed("the engine failed")

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        await asyncio.sleep(60)
        raise AssertionError("unreachable")

    response = json_lines_module.JsonLines(b'{"text": ["a"]}\n', rest())
    await response({"type": "http"}, receive, send)
    bodies = [message["body"] for message in sent[1:]]
    assert bodies == [
        b'{"text": ["a"]}\n',
        b'{"text": ["b"]}\n',
        b'{"error":"the engine failed"}\n',
    ]
    assert all(message["more_body"] for message in sent[1:])
