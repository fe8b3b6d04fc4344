"""Uploads of a model, with a stand-in for the hub's client. The real hub was never reached."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_offline.errors import HubRefused
from grpo_offline.recipe.reading import read_recipe
from grpo_offline.recipe.trained_model import hub_target, prepare, upload


class Hub:
    """`uploads`: the branch and the folder of each; `broken`: the hub does not answer."""

    def __init__(self) -> None:
        self.private: dict[str, bool | None] = {}
        self.branches = {"main"}
        self.tokens: set[str | None] = set()
        self.uploads: list[tuple[str, Path]] = []
        self.broken = False

    def client(self, token: str | None) -> Hub:
        self.tokens.add(token)
        return self

    def create_repo(self, name: str, private: bool | None, exist_ok: bool) -> SimpleNamespace:
        assert exist_ok
        if self.broken:
            raise OSError("wrong token")
        self.private[f"me/{name}"] = private
        return SimpleNamespace(repo_id=f"me/{name}")

    def list_repo_refs(self, _name: str) -> SimpleNamespace:
        return SimpleNamespace(branches=[SimpleNamespace(name=name) for name in self.branches])

    def create_branch(self, _name: str, branch: str, exist_ok: bool) -> None:
        assert exist_ok
        self.branches.add(branch)

    def upload_folder(self, repo_id: str, folder_path: Path, revision: str, **_: Any) -> str:
        if self.broken:
            raise OSError("no route")
        self.uploads.append((revision, folder_path))
        return f"https://hub/{repo_id}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.HfApi", hub.client)
    return hub


FLAGS = [
    *("--push_to_hub", "--hub_model_id", "sums"),
    *("--hub_model_revision", "seed-42", "--hub_token", "secret"),
]


def test_a_model_is_uploaded_to_a_branch_that_is_made(hub: Hub, tmp_path: Path) -> None:
    def uploaded(*flags: str) -> str:
        target = hub_target(read_recipe([*FLAGS, *flags]), tmp_path)
        assert target is not None
        return upload(prepare(target), tmp_path)

    assert uploaded("--hub_private_repo", "true") == "https://hub/me/sums"
    assert (hub.private, hub.tokens) == ({"me/sums": True}, {"secret"})
    assert hub.uploads == [("seed-42", tmp_path)]
    with pytest.raises(HubRefused, match="overwrite_hub_revision"):
        uploaded()
    uploaded("--overwrite_hub_revision")
    assert hub.uploads == [("seed-42", tmp_path)] * 2


def test_what_the_hub_refuses_is_named_before_the_run_and_the_model_stays(
    hub: Hub, tmp_path: Path
) -> None:
    target = hub_target(read_recipe(FLAGS), tmp_path)
    assert target is not None
    hub.broken = True
    with pytest.raises(HubRefused, match="hub_model_id: sums: wrong token; see hub_token"):
        prepare(target)
    with pytest.raises(HubRefused, match=f"no route; the model is in {tmp_path}. Upload it with"):
        upload(target, tmp_path)
