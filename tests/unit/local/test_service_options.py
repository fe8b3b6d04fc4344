"""Options of single services, on the command line and in a YAML file."""

from __future__ import annotations

import pytest

from grpo_local.service_options import (
    options_by_service,
    section,
    service_words,
    words_of_sections,
)

WORDS = [
    *("--trainer.max_staleness", "4", "--server.enforce-eager", "--env.temperature=0.7"),
    *("--trainer.lora-target-modules", "q_proj", "v_proj", "--trainer.vllm-flags=--seed 3"),
]


def test_the_last_value_of_an_option_counts() -> None:
    options = options_by_service(["--env.seed", "1", "--env.steps", "2", "--env.seed=3"])
    assert service_words(options["env"]) == ["--steps=2", "--seed=3"]


def test_sections_of_a_file_mean_the_same() -> None:
    options = options_by_service(WORDS)
    content = {service: section(found) for service, found in options.items()} | {"steps": 3}
    words, rest = words_of_sections(content)
    assert rest == {"steps": 3}
    assert options_by_service(words) == options
    dotted, _ = words_of_sections({"env.seed": 3, "server.x": False, "trainer.y": None})
    assert dotted == ["--env.seed=3", "--server.no-x"]
    with pytest.raises(ValueError, match="trainer: expected a section with one option per line"):
        words_of_sections({"trainer": 3})
