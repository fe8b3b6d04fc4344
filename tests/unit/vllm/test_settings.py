from __future__ import annotations

from pathlib import Path

import pytest

from grpo_vllm.settings import engine_settings_file, load_server_settings, settings_of_engine


def test_engines_get_the_settings_of_the_start_after_the_file_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_VLLM_MAX_LORAS", "3")
    file = tmp_path / "config.yaml"
    file.write_text("model: m\napi-key: hunter2\nengine-arguments: --enforce-eager\n")
    words = ["--config", str(file), "--max-loras", "2", "--logdir", "~/logs", "--", "--seed", "1"]
    settings = load_server_settings(words)
    assert settings.engine_arguments == ("--enforce-eager", "--seed", "1")
    file.write_text("model: other\n")
    with engine_settings_file(settings) as descriptor:
        first, second = settings_of_engine(descriptor), settings_of_engine(descriptor)
    assert first == second == settings
    assert first.bridge_config_required
