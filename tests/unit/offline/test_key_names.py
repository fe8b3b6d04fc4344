"""Messages name the keys that the user gives, and no option of another command."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_offline.command_line import value_of
from grpo_offline.errors import KeysInvalid
from grpo_offline.key_names import KEY_OF_OPTION, in_keys, in_recipe, line_in_keys
from grpo_offline.keys import OfflineKeys
from grpo_offline.recipe.translation import names_of_recipe
from grpo_offline.translate import environment_settings


@pytest.mark.parametrize(
    ("said", "in_hydra", "in_a_recipe"),
    [
        ("raise --steps", "raise train.iterations", "raise max_steps"),
        ("lower --lr.", "lower train.lr.", "lower learning_rate."),
        ("--lora-r 7: no", "grpo.lora_r 7: no", "lora_r 7: no"),
        ("--clip-eps", "grpo.clip_eps", "grpo.clip_eps"),
        ("set sync.mode=none", "set sync.mode=none", "set sync_mode=none"),
        ("vllm-api-server --enable-lora", "vllm-api-server --enable-lora", None),
        (
            "read /a/model.bin, grpo_trainer.model.x",
            "read /a/model.bin, grpo_trainer.model.x",
            None,
        ),
    ],
)
def test_options_become_keys(said: str, in_hydra: str, in_a_recipe: str | None) -> None:
    assert in_keys(said) == in_hydra
    assert in_recipe(said, names_of_recipe()) == (in_a_recipe or in_hydra)


def test_a_line_about_the_files_of_a_run_names_the_key() -> None:
    assert line_in_keys("grpo: runs/x/grpo.yaml: lr: expected a number") == (
        "train.lr: expected a number"
    )
    assert line_in_keys("env-server: x/env-server.yaml: seq-len: expected") == (
        "env_server.seq_len: expected"
    )
    assert line_in_keys("env-server: x/env-server.yaml: bogus: no such option") == (
        "env_server.bogus: no such option"
    )
    assert line_in_keys("grpo: --steps excludes --config") == (
        "grpo: train.iterations excludes --config"
    )


def test_every_key_exists() -> None:
    content = OfflineKeys(model={"train_id": "m"}, data={"task": "gsm8k"}).model_dump()  # type: ignore[arg-type]
    for key in KEY_OF_OPTION.values():
        if not key.startswith("hydra."):
            value_of(content, key)


def test_a_mistake_of_the_environment_names_its_key(tmp_path: Path) -> None:
    keys = OfflineKeys.model_validate(
        {"model": {"train_id": "m"}, "data": {"task": "gsm8k"}, "env_server": {"held_out": 2}}
    )
    with pytest.raises(KeysInvalid, match=r"^env_server\.held_out: expected .*; got '2'$"):
        environment_settings(keys, tmp_path)
