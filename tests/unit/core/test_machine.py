"""A model whose files were cut off is named before anything is loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from grpo_core.settings.machine import (
    missing_data,
    missing_model,
    missing_on_hub,
    missing_tokenizer,
)


@pytest.mark.parametrize(
    ("kept", "problem"),
    [(None, None), (-1, "incomplete: it has "), (60, "damaged"), (4, "damaged"), (0, "damaged")],
)
def test_a_model_of_which_bytes_are_missing_is_named(
    kept: int | None, problem: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(8), "b": np.zeros((2, 2))}, weights, {"format": "np"})
    weights.write_bytes(weights.read_bytes()[:kept])
    found = missing_model(str(tmp_path))
    assert found is None if problem is None else found is not None and problem in found


@pytest.mark.parametrize(
    "head",
    [b"[" * 20_000, b'{"a": {"data_offsets": [0, null]}}', b'{"a": {"data_offsets": [0, "x"]}}'],
)
def test_a_head_of_another_form_is_damage(head: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    assert "model.safetensors is damaged" in (missing_model(str(tmp_path)) or "")


def test_a_file_that_a_download_has_not_brought_yet_is_named(tmp_path: Path) -> None:
    """The hub's cache has links to files that come later."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").symlink_to("nowhere")
    assert "model.safetensors cannot be read: No such file" in (missing_model(str(tmp_path)) or "")


@pytest.mark.parametrize("name", ["consolidated.safetensors", "._model.safetensors"])
def test_files_that_are_not_loaded_may_be_anything(name: str, tmp_path: Path) -> None:
    """A pointer of Git LFS that was not fetched, and the attributes of a file on macOS."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1")
    assert missing_model(str(tmp_path)) is None


class _Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path.endswith("s/owner/known") else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HTTPServer]:
    missing_on_hub.cache_clear()
    server = HTTPServer(("127.0.0.1", 0), _Hub)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
    missing_on_hub.cache_clear()


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("check", [missing_model, missing_tokenizer])
def test_a_name_that_the_hub_does_not_have_is_named_before_anything_starts(
    check: Callable[[str], str | None],
) -> None:
    assert check("owner/known") is None
    assert "no directory owner/knwon, and at http" in (check("owner/knwon") or "")
    assert "Error 404: Not Found. Did you mean smollm2? Check" in (check("smolm2") or "")
    assert check("owner/of-vllm:Q4_K_M") is None


def test_a_hub_that_does_not_answer_is_left_to_the_download(hub: HTTPServer) -> None:
    hub.socket.close()
    assert missing_model("owner/known") is None


def test_a_data_set_that_the_hub_does_not_have_or_does_not_give_is_named(
    hub: HTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert missing_data("owner/known") is None
    assert "no file or directory owner/knwon, and at http" in (missing_data("owner/knwon") or "")
    assert missing_data("no id") is None
    hub.socket.close()
    assert "Check the name and the network" in (missing_data("owner/known") or "")
    (tmp_path / "owner___known").mkdir()
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    assert missing_data("owner/known") is None
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    assert missing_data("owner/other") is None


def test_a_command_that_makes_no_model_tells_how_it_is_made() -> None:
    assert "run `python -m grpo_tiny_model --smollm2`, and name" in (missing_model("smollm2") or "")
