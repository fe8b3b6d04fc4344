"""The keys have the names and defaults of the guide, and the configuration file says the same."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from pydantic import BaseModel

from grpo_offline.keys import CONFIG_FILE, OfflineKeys, config_text

GUIDE = """
model: {train_id: Qwen/Qwen2.5-1.5B, ref_id: Qwen/Qwen2.5-1.5B, device: auto}
generation: {backend: vllm_server, base_url: "http://127.0.0.1:30000", batch_size: 4,
  max_new_tokens: 256, temperature: 0.7, top_p: 0.95, top_k: 50, repetition_penalty: 1.1}
train: {iterations: 10, batch_size: 8, lr: 1.0e-5, grad_clip: 1.0, kl_coef: 0.05,
  entropy_coef: 0.0, grad_accum_steps: 1}
data: {problems_per_iteration: 4, rollouts_per_problem: 4, train_seed_start: 1000,
  num_train_seeds: 64}
eval: {enabled: true, interval: 1, backend: vllm_server, base_url: "http://127.0.0.1:30000",
  batch_size: 8, replicates: 4, num_ids: 16, id_seed_start: 5000, do_sample: true,
  max_new_tokens: 256, temperature: 0.7, top_p: 0.95, seed_base: 4242, ids: []}
checkpoint: {save_interval: 1, keep_last_k: 3, resume: null}
seed: 42
logging: {wandb: {enabled: false, project: "", run_name: ""}}
sync: {mode: auto}
"""


SECTIONS = [
    OfflineKeys,
    *(
        field.annotation
        for field in OfflineKeys.model_fields.values()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    ),
]


def leaves(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, dict):
            found |= leaves(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = [*value] if isinstance(value, tuple) else value
    return found


def composed(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(str(CONFIG_FILE.parent)):
        found = OmegaConf.to_container(compose("offline_grpo", [*overrides]), resolve=True)
    assert isinstance(found, dict)
    return found


def test_every_key_of_the_guide_has_its_default() -> None:
    expected, keys = leaves(yaml.safe_load(GUIDE)), leaves(OfflineKeys().model_dump())
    assert {name: keys[name] for name in expected} == expected


def test_the_configuration_file_is_that_of_the_keys() -> None:
    assert CONFIG_FILE.read_text() == config_text()  # python -m grpo_offline.keys
    assert OfflineKeys.model_validate(composed()) == OfflineKeys()


def test_the_evaluation_follows_the_rollouts_unless_it_is_told_otherwise() -> None:
    found = composed("generation.base_url=http://h:1", "generation.backend=local")["eval"]
    assert (found["base_url"], found["backend"]) == ("http://h:1", "local")
    assert composed("model.train_id=m")["model"]["ref_id"] == "m"


@pytest.mark.parametrize("kind", SECTIONS)
def test_an_unknown_key_is_refused(kind: type[BaseModel]) -> None:
    with pytest.raises(ValueError, match="no_such_key"):
        kind.model_validate({"no_such_key": 1})
