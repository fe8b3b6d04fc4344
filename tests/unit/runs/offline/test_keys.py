"""The keys have the names and defaults of the guide, and each changes what it says; training.sh,
environment.yml and the page of the guide agree with the code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from docs.generate.offline_keys import OPTION, descriptions
from grpo_env.assembly import open_tasks, sampling_plan
from grpo_env.tasks.item_stream import ItemStream
from grpo_runs.offline.data import items_to_evaluate, items_to_train
from grpo_runs.offline.iteration_end import evaluation_of
from grpo_runs.offline.keys import CONFIG_FILE, KEYS, OfflineKeys, leaves, put, sets_of
from grpo_runs.offline.servers import Sampling
from grpo_runs.offline.translate import environment_settings, trainer_command
from grpo_runs.recipe.keys import TABLE, GRPOConfig, ModelConfig, ScriptArguments
from tests.unit.runs.offline.conftest import MakeKeys

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


def paths(content: dict[str, Any]) -> dict[str, Any]:
    return {path: [*v] if isinstance(v, tuple) else v for path, v in leaves(content)}


def defaults() -> OfflineKeys:
    return OfflineKeys.model_validate({})


def composed(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(str(CONFIG_FILE.parent)):
        found = OmegaConf.to_container(compose("offline_grpo", [*overrides]), resolve=True)
    assert isinstance(found, dict)
    return found


def test_every_key_of_the_guide_has_its_default() -> None:
    expected, keys = paths(yaml.safe_load(GUIDE)), paths(defaults().model_dump())
    assert {name: keys[name] for name in expected} == expected


def test_the_file_that_hydra_composes_has_every_key_and_says_which_option_it_is() -> None:
    assert OfflineKeys.model_validate(composed()) == defaults()
    said = descriptions()
    assert said.keys() >= KEYS.keys()
    for path, text in said.items():
        if found := OPTION.fullmatch(text):
            section = found["command"].replace("-", "_")
            assert sets_of(KEYS[path]).same[0] == f"{section}.{found['name'].replace('-', '_')}"


def test_the_evaluation_follows_the_rollouts_unless_it_is_told_otherwise() -> None:
    found = composed("generation.base_url=http://h:1", "generation.backend=local")["eval"]
    assert (found["base_url"], found["backend"]) == ("http://h:1", "local")
    assert composed("model.train_id=m")["model"]["ref_id"] == "m"
    keys = OfflineKeys.model_validate({"generation": {"base_url": "http://h:1"}})
    assert keys.eval.base_url == "http://h:1"


def effects(keys: OfflineKeys, directory: Path) -> SimpleNamespace:
    """What the loop reads of a run's keys."""
    env = environment_settings(keys)
    with open_tasks(env) as tasks:
        stream = ItemStream(items_to_train(tasks, keys), keys.seed)
        return SimpleNamespace(
            grpo=trainer_command(keys, Sampling("local", "local"), directory).settings(),
            env=env,
            plan=sampling_plan(env, tasks),
            evaluation=evaluation_of(keys.eval, env),
            trained=[stream.next().key for _ in range(100)],
            evaluated=[item.key for one in items_to_evaluate(tasks, keys) for item in one.items],
        )


Read = Callable[[SimpleNamespace], Any]
OTHER = object()
"""Another directory of the model."""
EFFECTS: dict[str, tuple[Any, Read, Any]] = {
    "model.train_id": (OTHER, lambda e: (e.grpo.model[-5:], e.env.model[-5:]), ("other", "other")),
    "model.ref_id": (OTHER, lambda e: str(e.grpo.reference_model)[-5:], "other"),
    "model.device": ("auto", lambda e: e.grpo.device, "auto"),
    "model.dtype": ("bfloat16", lambda e: e.grpo.dtype, "bfloat16"),
    "generation.batch_size": (2, lambda e: e.env.max_concurrent_groups, 2),
    "generation.base_url": ("http://h:1", lambda e: e.grpo.inference_url, "http://h:1"),
    "generation.max_new_tokens": (7, lambda e: e.plan.max_completion_tokens, 7),
    "generation.temperature": (0.5, lambda e: e.plan.temperature, 0.5),
    "generation.top_p": (0.5, lambda e: e.plan.reshaping["top_p"], 0.5),
    "generation.top_k": (9, lambda e: e.plan.reshaping["top_k"], 9),
    "generation.repetition_penalty": (1.5, lambda e: e.plan.reshaping["repetition_penalty"], 1.5),
    "train.iterations": (3, lambda e: e.grpo.steps, 6),
    "train.batch_size": (4, lambda e: (e.grpo.batch_size, e.grpo.steps), (4, 8)),
    "train.lr": (0.5, lambda e: e.grpo.lr, 0.5),
    "train.grad_clip": (0.5, lambda e: e.grpo.max_grad_norm, 0.5),
    "train.kl_coef": (0.3, lambda e: e.grpo.kl_coef, 0.3),
    "train.entropy_coef": (0.3, lambda e: e.grpo.entropy_coef, 0.3),
    "train.grad_accum_steps": (
        2,
        lambda e: (e.grpo.gradient_accumulation_steps, e.grpo.steps),
        (2, 2),
    ),
    "data.task": ("arithmetic", lambda e: e.env.task, "arithmetic"),
    "data.problems_per_iteration": (8, lambda e: e.grpo.steps, 8),
    "data.rollouts_per_problem": (8, lambda e: e.plan.group_size, 8),
    "data.train_seed_start": (1001, lambda e: {*e.trained}, None),
    "data.num_train_seeds": (3, lambda e: len({*e.trained}), 3),
    "eval.batch_size": (3, lambda e: e.evaluation.requests, 3),
    "eval.replicates": (7, lambda e: (e.evaluation.samples, e.evaluation.ks), (7, (1, 5))),
    "eval.num_ids": (1, lambda e: len(e.evaluated), 1),
    "eval.id_seed_start": (5001, lambda e: e.evaluated, None),
    "eval.do_sample": (False, lambda e: (e.evaluation.temperature, e.evaluation.samples), (0, 1)),
    "eval.temperature": (0.3, lambda e: e.evaluation.temperature, 0.3),
    "eval.top_p": (0.3, lambda e: e.evaluation.reshaping, {"top_p": 0.3}),
    "eval.ids": ([0, 1], lambda e: len(e.evaluated), 2),
    "checkpoint.save_interval": (2, lambda e: e.grpo.checkpoint_interval, 4),
    "checkpoint.keep_last_k": (5, lambda e: e.grpo.keep_checkpoints, 5),
    "logging.wandb.enabled": (True, lambda e: e.grpo.use_wandb, True),
    "logging.wandb.project": ("p", lambda e: e.grpo.wandb_project, "p"),
    "logging.level": ("INFO", lambda e: (e.grpo.log_level, e.env.log_level), ("INFO", "INFO")),
    "grpo": ({"objective": "dapo"}, lambda e: e.grpo.objective, "dapo"),
    "env_server": ({"system_prompt": "Be brief."}, lambda e: e.env.system_prompt, "Be brief."),
    "seed": (7, lambda e: (e.grpo.seed, e.env.seed), (7, 7)),
}
"""Key: a value, where its effect is read, and what is read; None: another value than without."""

SEEN_ELSEWHERE = {
    **dict.fromkeys(("eval.enabled", "eval.interval", "eval.backend", "eval.base_url"), "test_run"),
    **dict.fromkeys(("eval.max_new_tokens", "eval.seed_base"), "test_run"),
    **dict.fromkeys(("checkpoint.resume", "logging.wandb.run_name"), "test_command_line"),
    **dict.fromkeys(("generation.backend", "sync.mode"), "test_sampling"),
}


def test_every_key_has_a_row() -> None:
    assert {*KEYS} == {*EFFECTS} | {*SEEN_ELSEWHERE}


@pytest.mark.parametrize("name", [*EFFECTS])
def test_a_key_has_its_effect(name: str, make_keys: MakeKeys, model: str, tmp_path: Path) -> None:
    value, read, expected = EFFECTS[name]
    if value is OTHER:
        (tmp_path / "other").symlink_to(model)
        value = str(tmp_path / "other")
    content: dict[str, Any] = {"data": {"num_train_seeds": 4}}
    before = read(effects(make_keys(**content), tmp_path))
    put(content, name, value)
    after = read(effects(make_keys(**content), tmp_path))
    assert before != (after if expected is None else expected)
    assert expected in (None, after)


ROOT = Path(__file__).parents[4]
SCRIPT = (ROOT / "training.sh").read_text()
PAGE = (ROOT / "docs/how-to/training-guide.md").read_text()
FIELDS = json.loads((Path(__file__).parent / "trl_1_16_0_fields.json").read_text())
"""Names and defaults of the fields of TRL's classes, by `dataclasses.fields`."""
OTHER_DEFAULTS = ("dtype", "eval_dataset_split")


def test_every_field_of_trl_is_in_the_table_with_trls_default() -> None:
    assert [len(fields) for fields in FIELDS.values()] == [189, 19, 6]
    for kind in (GRPOConfig, ModelConfig, ScriptArguments):
        for name, default in FIELDS[kind.__name__].items():
            key = TABLE[name]
            assert key.owner == kind.__name__, name
            if key.alias_of or name in OTHER_DEFAULTS:
                continue
            assert name in kind.__dataclass_fields__
            wanted = [default] if key.is_list and isinstance(default, str) else default
            assert key.default == wanted, name


def test_the_page_lists_every_variable() -> None:
    of_script = set(re.findall(r"^(?:export )?([A-Z_0-9]+)=\$\{\1:-", SCRIPT, re.MULTILINE))
    of_script |= set(re.findall(r"\$\{([A-Z_0-9]+):-[^}]", SCRIPT))
    plan = (ROOT / "services/runs/grpo_runs/recipe/server_plan.py").read_text()
    of_plan = set(re.findall(r'environment\.get\("([A-Z_]+)"', plan)) - {"GPUS"}
    listed = set(re.findall(r"^\| `([A-Z_]+)` \|", PAGE, re.MULTILINE))
    ours = {"CONFIG", "USE_CONDA", "PYTHON", "VLLM_MODEL", "SYNC_MODE", *of_plan}
    from_outside = {"SLURM_CPUS_PER_TASK", "SLURM_SUBMIT_DIR", "CUDA_VISIBLE_DEVICES"}

    assert listed >= ours
    assert of_script - from_outside - {"TIMESTAMP", "MAIN_PROCESS_PORT"} <= listed


def test_the_conda_environment_installs_every_package() -> None:
    content = yaml.safe_load((ROOT / "environment.yml").read_text())
    words = [line.split() for line in content["dependencies"][-1]["pip"]]
    packages = {path.removeprefix("./") for option, path in words if option == "--editable"}
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")

    assert packages == set(re.search(r"^PACKAGES := (.*)$", makefile, re.MULTILINE)[1].split())
    for option, path in words:
        assert (ROOT / path).exists(), option
