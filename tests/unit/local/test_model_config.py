from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_local.models import longest_sequence


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"max_position_embeddings": 512}, 512),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 8192}}, 8192),
        ({}, None),
        (None, None),
    ],
)
def test_the_limit_of_a_model_is_read_from_its_configuration(
    config: dict[str, Any] | None, limit: int | None, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert longest_sequence(str(tmp_path)) == limit
    assert longest_sequence("smollm2") == 8192, "known before it is made"
