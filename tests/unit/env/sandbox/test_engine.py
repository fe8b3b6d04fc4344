"""Words of docker commands."""

from __future__ import annotations

import pytest

from grpo_env.sandbox.engine import variables


@pytest.mark.parametrize("name", ["API_KEY", "GOOGLE_API_KEY", "PATHS", "PYTHONPATH"])
def test_a_command_line_shows_no_value(name: str) -> None:
    assert variables({name: "secret", "N": ""}) == ["--env", name, "--env", "N"]


@pytest.mark.parametrize("name", ["PATH", "HOME", "DOCKER_HOST", "LD_PRELOAD", "https_proxy"])
def test_a_variable_that_would_change_docker_itself_is_no_variable_of_it(name: str) -> None:
    assert variables({name: "/x"}) == ["--env", f"{name}=/x"]
