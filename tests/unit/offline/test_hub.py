"""Uploads a model to a loopback server with the hub's routes. The real hub was never reached."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.unit.offline.hub_server import Hub, loopback_hub

# huggingface_hub reads HF_ENDPOINT when it is imported, so each upload has a process of its own.
_UPLOAD = """
import json, sys
from pathlib import Path
from grpo_core.errors import GrpoError
from grpo_offline.recipe.hub import hub_target, prepare, upload
from grpo_offline.recipe.reading import read_recipe

folder, *flags = sys.argv[1:]
target = hub_target(read_recipe(flags), Path(folder).parent)
try:
    print(upload(prepare(target), Path(folder)))
except GrpoError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def upload(hub: Hub, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if "proxy" not in name.lower()
    } | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [sys.executable, "-c", _UPLOAD, str(folder), *flags],
        env=environment,
        capture_output=True,
        text=True,
    )


def test_a_model_is_uploaded_to_a_branch_that_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "final_model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (folder / "model.safetensors").write_bytes(bytes(range(256)))
    flags = ["--push_to_hub", "--hub_model_id", "me/sums", "--hub_model_revision", "seed-42"]
    flags += ["--hub_private_repo", "true"]
    with loopback_hub() as hub:
        done = upload(hub, folder, *flags, "--hub_token", hub.token)
        assert done.returncode == 0, done.stderr
        assert "me/sums" in hub.repositories
        assert hub.branches == {"main", "seed-42"}
        assert {path for branch, path in hub.files if branch == "seed-42"} == {
            "config.json",
            "model.safetensors",
        }
        assert hub.files["seed-42", "model.safetensors"] == bytes(range(256))

        again = upload(hub, folder, *flags, "--hub_token", hub.token)
        assert "HubRefused" in again.stderr
        assert "overwrite_hub_revision" in again.stderr
        anyway = upload(hub, folder, *flags, "--hub_token", hub.token, "--overwrite_hub_revision")
        assert anyway.returncode == 0, anyway.stderr


def test_a_wrong_token_is_named_before_the_run(tmp_path: Path) -> None:
    with loopback_hub() as hub:
        flags = ["--push_to_hub", "--hub_model_id", "me/sums", "--hub_token", "wrong"]
        done = upload(hub, tmp_path, *flags)

        assert "HubRefused: hub_model_id: me/sums: " in done.stderr
        assert not hub.repositories
