"""Traps on the command line of an environment on atroposlib (docs/compatibility.md).

They belong to atroposlib, which is pinned; our servers have no part in them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.compat.upstream_install import Upstream
from tests.compat.upstream_processes import run_script

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]  # the first use installs atroposlib

URL = "http://10.0.0.7:9001/v1"
LOCAL_PORTS = [f"http://localhost:{port}/v1" for port in (9004, 9005, 9006, 9007)]


@pytest.fixture(scope="module")
def outcomes(upstream: Upstream, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("command-lines")
    server = {"server_type": "vllm", "base_url": URL, "model_name": str(tiny_model), "api_key": "x"}
    for count in (1, 2):
        # JSON is YAML.
        (directory / f"{count}.yaml").write_text(json.dumps({"openai": [server] * count}))
    tokenizer = ["--env.tokenizer_name", str(tiny_model)]
    keyless = [
        *tokenizer,
        *("--openai.server_type", "vllm"),
        *("--openai.base_url", URL),
        *("--openai.model_name", str(tiny_model)),
    ]
    flags = [*keyless, "--openai.api_key", "x"]
    cases = {
        "right": (False, [*flags, "--env.total_steps=-1", "--env.group_size", "8"]),
        "steps after a space": (False, [*flags, "--env.total_steps", "-1"]),
        "no key": (False, keyless),
        "bare": (True, flags),
        "bare, file with one server": (True, [*tokenizer, "--config", str(directory / "1.yaml")]),
        "bare, file with two servers": (True, [*tokenizer, "--config", str(directory / "2.yaml")]),
    }
    request = {name: {"bare": bare, "flags": given} for name, (bare, given) in cases.items()}
    return run_script(upstream, "command_lines.py", request, directory)


def test_flags_are_taken(outcomes: Any) -> None:
    assert outcomes["right"] == {"urls": [URL], "total_steps": -1, "group_size": 8}


def test_minus_one_after_a_space_becomes_one_step(outcomes: Any) -> None:
    assert outcomes["steps after a space"]["total_steps"] == 1


def test_a_key_must_be_given(outcomes: Any) -> None:
    assert "api_key" in outcomes["no key"]["error"]


def test_a_bare_server_configuration_takes_the_url_only_from_a_file_with_two_servers(
    outcomes: Any,
) -> None:
    assert outcomes["bare"]["urls"] == LOCAL_PORTS
    assert outcomes["bare, file with one server"]["urls"] == LOCAL_PORTS
    assert outcomes["bare, file with two servers"]["urls"] == [URL, URL]
