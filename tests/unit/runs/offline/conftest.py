"""A small model with random weights, keys of a short run with it in this process, and recipes."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_runs.offline import screen
from grpo_runs.offline.keys import OfflineKeys
from grpo_runs.recipe.keys import TrainingRecipe, read_recipe
from tests.support.threads import one_thread
from tests.unit.trainer.tiny_policy import model_directory

MakeKeys = Callable[..., OfflineKeys]
Recipes = Callable[..., TrainingRecipe]


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(model_directory(tmp_path_factory.mktemp("offline") / "model"))


@pytest.fixture(scope="session")
def make_keys(model: str) -> MakeKeys:
    """Args: sections, each with the keys that differ from those of a short local run."""

    def make(**sections: Any) -> OfflineKeys:
        content: dict[str, Any] = {
            "model": {"train_id": model, "ref_id": model, "device": "cpu"},
            "generation": {"backend": "local", "max_new_tokens": 4},
            "eval": {"backend": "local", "max_new_tokens": 4, "num_ids": 3, "replicates": 2},
            "train": {"iterations": 2, "lr": 1e-3},
            "data": {"task": "tests/unit/runs/offline/rewards.py:length"},
            "grpo": {"seq_len": 64},
            "env_server": {
                "seq_len": 64,
                "data": "tests/unit/runs/offline/rows.jsonl",
                "held_out": 0.4,
                "reward_workers": 0,  # rewards run in this process
            },
        }
        for name, keys in sections.items():
            is_section = isinstance(keys, dict)
            content[name] = {**content.get(name, {}), **keys} if is_section else keys
        return OfflineKeys.model_validate(content)

    return make


@pytest.fixture(autouse=True)
def _no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """To draw them takes a third of a short run's time. Runs of wider fixtures draw theirs."""
    monkeypatch.setattr("grpo_runs.offline.loop.draw", lambda _files: None)


@pytest.fixture
def unchanged_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands leave logging, threads and signal handlers of this process as they are."""
    monkeypatch.setattr(screen, "configure_logging", lambda *_: None)
    monkeypatch.setattr(screen, "prepare_cpu", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)


@pytest.fixture
def recipe_of(tmp_path: Path) -> Recipes:
    """Args: keys, which are read from a file."""

    def read(**content: Any) -> TrainingRecipe:
        file = tmp_path / "recipe.yaml"
        file.write_text(json.dumps({"model_name_or_path": "m", **content}))  # JSON is YAML
        return read_recipe(["--config", str(file)])

    return read
