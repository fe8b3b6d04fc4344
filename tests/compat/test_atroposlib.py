"""Unmodified atroposlib works with our services: the tests that it ships for its own server, and
the calls of its environment base and of its client of the inference server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compat.upstream_install import Upstream
from tests.compat.upstream_processes import SCRIPTS, require_passes, run_script
from tests.fixtures.inference import InferenceServer
from tests.integration.run_api_calls import ApiClient

pytestmark = pytest.mark.timeout(1800)  # the first use installs atroposlib

MODULES = ("test_api_legacy.py", "test_api_compression.py", "test_api_messages_handling.py")
TESTS = 36


def test_the_tests_that_it_ships_pass(
    upstream: Upstream, clean_run_api: str, tmp_path: Path
) -> None:
    tests = next(upstream.python.parents[1].glob("lib/python*/site-packages/atroposlib/tests"))
    command = [upstream.python, "-m", "pytest", "-p", "redirect", *(tests / m for m in MODULES)]
    variables = {"PYTHONPATH": str(SCRIPTS), "RUN_API_URL": clean_run_api}
    require_passes(command, TESTS, tmp_path, **variables)


GROUPS, GROUP_SIZE = 5, 2
GZIP_FROM_BYTES = 1024
"""atroposlib compresses bodies from this size on."""

ARCHIVED_KEYS = {
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params"),
    *("inference_logprobs", "overrides", "group_overrides", "images", "env_id"),
    *("distill_token_ids", "distill_logprobs"),
}
"""What the archived server puts into every item of a batch, and its trainer reads."""


@pytest.fixture(scope="module")
def http(run_api_url: str) -> Iterator[ApiClient]:
    """A trainer that has registered and polled."""
    sizes = {"batch_size": GROUPS * GROUP_SIZE, "max_token_len": 512}
    with ApiClient(base_url=run_api_url) as client:
        client.get("/reset_data").raise_for_status()
        client.start(wandb_group="a group", wandb_project="", **sizes)
        yield client


@pytest.fixture(scope="module")
def calls(
    upstream: Upstream,
    http: ApiClient,
    shared_server: InferenceServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    model = str(shared_server.model)
    request = {
        "environment": {"url": str(http.base_url).rstrip("/"), "tokenizer": model},
        "inference": {"base_url": f"{shared_server.url}/v1", "model": model},
    }
    return run_script(upstream, "calls.py", request, tmp_path_factory.mktemp("calls"))


def test_calls_of_the_environment_base(calls: Any, http: ApiClient) -> None:
    seen = calls["environment"]
    registered = http.get("/environments").json()
    assert [environment["env_id"] for environment in registered] == [seen["env_id"]]
    assert seen["name"] == "calls_0"
    assert seen["wandb"] == ["", "a group"], "an empty project is one"
    assert (seen["batch_size"], seen["max_token_len"]) == (GROUPS * GROUP_SIZE, 512)
    assert seen["status"]["env_weight"] == 1.0
    assert min(seen["body_bytes"]) < GZIP_FROM_BYTES <= max(seen["body_bytes"])

    assert seen["queue_before_refusal"] == GROUPS
    assert seen["queue_after_refusal"] == GROUPS, "tried once and dropped, without an error"

    *sent, refused = seen["sent"]
    assert refused["inference_logprobs"] == [[1.0, 1.0]] * 2
    assert_served_as_sent(http, sent)


def assert_served_as_sent(http: ApiClient, sent: list[Any]) -> None:
    groups = [g for body in sent for g in (body if isinstance(body, list) else [body])]
    batch = http.get("/batch").json()["batch"]
    for item, group in zip(batch, groups, strict=True):
        assert set(item) == ARCHIVED_KEYS
        assert {key: item[key] for key in group} == group
    built_by_base = batch[-1]
    assert built_by_base["advantages"] == built_by_base["messages"] == []
    assert built_by_base["group_overrides"] == {}


NOISE_NATS = 1e-4
MASKED = -100
MAX_TOKENS = 6


@pytest.fixture
def seen(calls: Any) -> Any:
    return calls["inference"]


def test_openai_routes(seen: Any) -> None:
    assert len(seen["chat"]) == len(seen["text"]) == 3
    assert {*seen["chat"], *seen["text"]} <= {"stop", "length"}


def test_native_generation(seen: Any) -> None:
    native = seen["native"]
    assert len(native["tokens"]) == len(native["logprobs"]) == len(native["reasons"]) == 10
    assert set(native["reasons"]) <= {"stop", "length"}
    for tokens, logprobs in zip(native["tokens"], native["logprobs"], strict=True):
        assert 1 <= len(tokens) == len(logprobs) <= MAX_TOKENS
        assert max(logprobs) <= 0.0


def test_logprobs_over_two_turns_are_those_of_the_tokens(seen: Any) -> None:
    """Sampled positions of both turns, against what the server says of the same tokens."""
    sampled = [
        (logprob, scored)
        for node in seen["turns"]
        for mask, logprob, scored in zip(
            node["masked_tokens"], node["logprobs"], node["scored"], strict=True
        )
        if mask != MASKED
    ]
    assert len(sampled) >= 2
    assert max(abs(logprob - scored) for logprob, scored in sampled) < NOISE_NATS


def test_prompt_positions_are_marked(seen: Any) -> None:
    for node in seen["turns"]:
        for mask, token, logprob in zip(
            node["masked_tokens"], node["tokens"], node["logprobs"], strict=True
        ):
            assert (mask == MASKED) == (logprob == 1.0)
            assert mask in (MASKED, token)


def test_a_wrong_parameter_is_refused(seen: Any) -> None:
    assert seen["refused"] == 400
