"""`POST /generate` on a real vLLM: answers, streams, refusals, and the effects of parameters.

The tiny model's tokens 0 to 255 are bytes in the tokenizer's order: 5 is an ampersand.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import httpx
import numpy
import pytest

from grpo_core.clients.inference import GenerateAnswer
from grpo_core.wire.scored_group import RolloutFacts, ScoredGroup
from grpo_env.rollout.groups import TrainingSequence
from grpo_trainer.data.receipts import check_receipts
from grpo_trainer.errors import RolloutMismatch
from tests.fixtures.inference import InferenceServer
from tests.inference.request_load import (
    MOST_RUNNING,
    generated_tokens,
    running_sequences,
    unfinished_sequences,
)
from tests.support.wait import wait_for

PROMPT = [5, 6, 7, 8]
CONTEXT_TOKENS = 512
LONG_PROMPT = [5] * 470
DEFAULTS: dict[str, Any] = {"prompt": {"prompt_token_ids": PROMPT}, "max_tokens": 12, "logprobs": 0}
Answer = dict[str, Any]


def answer_to(server: InferenceServer, **body: Any) -> Answer:
    answer = httpx.post(f"{server.url}/generate", json=DEFAULTS | body)
    found: Answer = answer.raise_for_status().json()
    return found


def test_the_answer_has_the_shape_of_the_contract(shared_server: InferenceServer) -> None:
    answer = answer_to(
        shared_server, n=3, logprobs=5, prompt_logprobs=0, temperature=1.5, ignore_eos=True
    )
    assert len(answer["text"]) == len(answer["token_ids"]) == 3
    assert answer["finish_reasons"] == ["length"] * 3
    assert (answer["prompt"], answer["prompt_token_ids"]) == ("&'()", PROMPT)
    assert [entry and list(entry) for entry in answer["prompt_logprobs"]] == [
        None,
        *(["6"], ["7"], ["8"]),
    ]
    for tokens, logprobs in zip(answer["token_ids"], answer["logprobs"], strict=True):
        assert len(tokens) == len(logprobs) == 12
        for token, (alternatives,) in zip(tokens, logprobs, strict=True):
            assert next(iter(alternatives)) == str(token)  # the sampled one leads
            assert len(alternatives) in (5, 6)  # it may be among the 5 likeliest or not
            assert all(-50 < logprob <= 0 for logprob in alternatives.values())
    for first, last in answer["policy_version"]:
        assert first == last


def next_float32(values: list[float], place: int) -> None:
    values[place] = float(numpy.nextafter(numpy.float32(values[place]), numpy.float32(-100)))


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "tokens of the prompt: .* token 2": lambda sent: sent["tokens"][1].__setitem__(2, 9),
    "inference_logprobs: .* token 9": lambda sent: next_float32(sent["inference_logprobs"][1], 9),
    "policy_version": lambda sent: sent["group_overrides"]["policy_version"][1][1].__setitem__(
        1, 99
    ),
    "score": lambda sent: sent["scores"].reverse(),
    "top_k: sampled with 40": lambda sent: sent["generation_params"].pop("top_k"),
}


def test_what_changes_between_the_answer_and_the_trainer_is_named(
    shared_server: InferenceServer,
) -> None:
    sampling = {"temperature": 0.8, "top_k": 40}
    answer = answer_to(shared_server, n=2, ignore_eos=True, **sampling)
    completions = GenerateAnswer.model_validate(answer).completions()
    sequences = [TrainingSequence().add_prompt(PROMPT).add_completion(c) for c in completions]
    versions = [(one.first_version, one.last_version) for one in completions]
    group = ScoredGroup(
        tokens=[one.tokens for one in sequences],
        masks=[one.masks for one in sequences],
        inference_logprobs=[one.logprobs for one in sequences],
        scores=[1.0, 0.0],
        generation_params=sampling,
        overrides=[one.receipt(score) for one, score in zip(sequences, (1.0, 0.0), strict=True)],
        group_overrides=RolloutFacts(policy_version=versions).on_the_wire(),
    )
    check_receipts(0, ScoredGroup.model_validate_json(group.model_dump_json()))
    for told, change in CHANGES.items():
        sent = group.model_dump(mode="json")
        change(sent)
        with pytest.raises(RolloutMismatch, match=told):
            check_receipts(0, ScoredGroup.model_validate(sent))


def test_a_text_prompt_ends_at_the_stop_token(shared_server: InferenceServer) -> None:
    prompt = "<|im_start|>user\n3+4=<|im_end|>\n<|im_start|>assistant\n"
    answer = answer_to(shared_server, prompt=prompt, max_tokens=20)
    assert answer["prompt"] == prompt
    (completion,) = GenerateAnswer.model_validate(answer).completions()
    assert completion.finish_reason == "stop"
    assert len(completion.token_ids) < 20


def test_logprobs_of_the_sampled_tokens_are_the_default(shared_server: InferenceServer) -> None:
    """As for the archived server: the request of its documents has no parameter `logprobs`."""
    body = {"prompt": "Hello", "max_tokens": 5, "temperature": 0}
    sampled, *others = (
        httpx.post(f"{shared_server.url}/generate", json=body | more).json()
        for more in ({}, {"logprobs": True}, {"logprobs": False}, {"logprobs": None})
    )
    (tokens,) = sampled["token_ids"]
    assert [list(entry) for (entry,) in sampled["logprobs"][0]] == [[str(t)] for t in tokens]
    assert others[0]["logprobs"] == sampled["logprobs"]  # the likeliest token was sampled
    assert ["logprobs" in answer for answer in others] == [True, False, False]


AMPERSANDS = {"logit_bias": {"5": 100}, "ignore_eos": True}
"""Sampling parameters that always give token 5."""

EFFECTS: list[tuple[dict[str, Any], Callable[[Answer], object]]] = [
    ({"n": 4, "top_k": 1}, lambda a: (len(a["text"]), len({*a["text"]})) == (4, 1)),
    (
        {"max_tokens": 10**6, "prompt": {"prompt_token_ids": LONG_PROMPT}, **AMPERSANDS},
        lambda a: len(a["token_ids"][0]) == CONTEXT_TOKENS - len(LONG_PROMPT),
    ),
    ({"stop": "&&&", **AMPERSANDS}, lambda a: (a["text"], a["finish_reasons"]) == ([""], ["stop"])),
    ({"stop_token_ids": [5], **AMPERSANDS}, lambda a: a["token_ids"] == [[5]]),
    # Alternatives with probability 0 have no finite logprob and are left out.
    ({"logprobs": 5, "top_k": 1}, lambda a: {len(e) for (e,) in a["logprobs"][0]} == {1}),
    ({"structured_outputs": {"regex": "[0-9]{3}"}}, lambda a: a["text"][0].isdigit()),
]


@pytest.mark.parametrize(
    ("body", "has_effect"), EFFECTS, ids=[json.dumps(body)[:50] for body, _ in EFFECTS]
)
def test_a_parameter_has_its_effect(
    shared_server: InferenceServer, body: dict[str, Any], has_effect: Callable[[Answer], object]
) -> None:
    answer = answer_to(shared_server, **body)
    assert has_effect(answer), answer
    (logprobs, *_) = answer["logprobs"]
    assert all(math.isfinite(value) for (entry,) in logprobs for value in entry.values())


PROMPT_TEXT = "&'()"
STREAMED: dict[str, Any] = {
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
    with httpx.stream("POST", f"{server.url}/generate", json=STREAMED | body) as response:
        yield response


def lines_of(server: InferenceServer, **body: Any) -> list[dict[str, Any]]:
    with streamed(server, **body) as response:
        response.raise_for_status()
        assert response.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in response.iter_lines()]


def test_each_line_has_prompt_and_text_so_far_of_every_completion(
    shared_server: InferenceServer,
) -> None:
    lines = lines_of(shared_server, n=3, max_tokens=60)
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
    whole = STREAMED | body | {"stream": False}
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
    body = json.dumps(STREAMED | ENDLESS | {"stream": stream}).encode()
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


VALID: dict[str, Any] = {"prompt": {"prompt_token_ids": [5, 6]}, "max_tokens": 4, "logprobs": 0}
CHAT = [{"role": "user", "content": "1+1="}]


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "prompt": [
        ({"prompt": ""}, "prompt: expected at least one token"),
        ({"prompt": {"prompt_token_ids": [1], "multi_modal_data": {}}}, "prompt: expected"),
        ({"prompt": {"prompt_token_ids": [1, 99999]}}, "prompt_token_ids[1]"),
        ({"prompt": {"prompt_token_ids": [1] * 600}}, "600 tokens"),
        ({"prompt": "x" * 100_000}, "prompt: 100000 characters"),
    ],
    "several mistakes, all of them named": [
        ({"n": 0, "best_of": 3, "watermarking": True}, "n: expected"),
        ({"n": 0, "best_of": 3, "watermarking": True}, "unknown parameters: best_of"),
        ({"n": 0, "best_of": 3, "watermarking": True}, "watermarking: the server does not support"),
    ],
    "only the server sets it": [
        ({"output_kind": 2}, "output_kind: the server sets this parameter")
    ],
    "wrong type": [
        ({"temperature": "hot"}, "temperature"),
        ({"stream": "yes"}, "stream: expected true or false"),
    ],
    "outside vLLM's range": [
        ({"top_p": 7}, "top_p"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"n": 2, "temperature": 0}, "n"),
    ],
    "outside our range, where logits would overflow": [
        ({"logit_bias": {"5": 1e39}}, "logit_bias: expected values of at most"),
        ({"repetition_penalty": 1e-30}, "repetition_penalty: expected 0.01"),
    ],
    "would end the engine, or spoil the answers of others": [
        ({"seed": 1}, "seed: not supported per request on CPU"),
        ({"logprob_token_ids": [1], "logprobs": 1}, "logprob_token_ids"),
        ({"prompt_logprobs": 0, "skip_reading_prefix_cache": False}, "skip_reading_prefix_cache"),
        ({"stop": ["\ud800"]}, "surrogate"),
    ],
    "inside a nested value": [
        ({"repetition_detection": {"pattern": 1}}, "repetition_detection: unknown fields pattern"),
        ({"extra_args": {"deep": nested(100)}}, "extra_args: nested deeper"),
        ({"structured_outputs": {"choice": ["x" * 1000] * 17}}, "structured_outputs: 17"),
    ],
    "a grammar that cannot be followed": [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs")
    ],
    "no token is left to sample": [
        ({"allowed_token_ids": [65], "bad_words": ["b"]}, "leave no token"),
        (
            {"structured_outputs": {"choice": ["a"]}, "allowed_token_ids": [5]},
            "allowed_token_ids, structured_outputs: these constraints leave no token",
        ),
    ],
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_mistake_is_named(shared_server: InferenceServer, mistake: str) -> None:
    for body, says in REFUSED[mistake]:
        content = json.dumps(VALID | body)
        answer = httpx.post(f"{shared_server.url}/generate", content=content)
        assert answer.status_code == 400, body
        assert says in answer.json()["detail"], body
    assert httpx.post(f"{shared_server.url}/generate", json=VALID).status_code == 200


def test_bodies_that_are_no_json_object_or_too_large_are_refused(
    shared_server: InferenceServer,
) -> None:
    bodies = (b"{", b"[]", b"\xff", b'{"prompt": NaN}', b"[" * 100_000, b" " * 17 * 2**20)
    for content, status in zip(bodies, [*[400] * 5, 413], strict=True):
        answer = httpx.post(f"{shared_server.url}/generate", content=content)
        assert answer.status_code == status, content[:20]


@pytest.mark.parametrize("prompt", [{"prompt": "1"}, {"messages": CHAT}])
def test_a_seed_does_not_end_the_engine_on_vllms_own_routes(
    shared_server: InferenceServer, prompt: dict[str, Any]
) -> None:
    """vLLM itself accepts the seed on CPU, but crashes if a prefill is chunked or recomputed."""
    route = "completions" if "prompt" in prompt else "chat/completions"
    body = {"model": str(shared_server.model), "seed": 1, "max_tokens": 2, **prompt}
    answer = httpx.post(f"{shared_server.url}/v1/{route}", json=body)
    assert answer.status_code == 400
    assert "seed: not supported per request on CPU" in answer.text


def test_unauthenticated_development_routes_are_off(shared_server: InferenceServer) -> None:
    for route in ("/pause", "/resume", "/sleep", "/collective_rpc", "/reset_prefix_cache"):
        assert httpx.post(f"{shared_server.url}{route}").status_code == 404
