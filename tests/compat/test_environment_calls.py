"""Groups of atroposlib's environment base arrive whole, and a wrong one is dropped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compat.upstream_install import Upstream
from tests.compat.upstream_processes import run_script
from tests.integration.run_api_calls import ApiClient

pytestmark = pytest.mark.timeout(1800)  # the first use installs atroposlib

GROUPS, GROUP_SIZE = 5, 2
GZIP_FROM_BYTES = 1024
"""atroposlib compresses bodies from this size on."""

ARCHIVED_KEYS = {
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params"),
    *("inference_logprobs", "overrides", "group_overrides", "images", "env_id"),
    *("distill_token_ids", "distill_logprobs"),
}
"""What the archived server puts into every item of a batch, and its trainer reads."""


@pytest.fixture
def http(clean_run_api: str) -> Iterator[ApiClient]:
    """A trainer that has registered and polled."""
    sizes = {"batch_size": GROUPS * GROUP_SIZE, "max_token_len": 512}
    with ApiClient(base_url=clean_run_api) as client:
        client.start(wandb_group="a group", wandb_project="", **sizes)
        yield client


def test_calls_of_the_environment_base(
    upstream: Upstream, http: ApiClient, tiny_model: Path, tmp_path: Path
) -> None:
    request = {"url": str(http.base_url).rstrip("/"), "tokenizer": str(tiny_model)}
    seen = run_script(upstream, "environment_calls.py", request, tmp_path)

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
