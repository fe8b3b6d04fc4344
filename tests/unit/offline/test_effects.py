"""Each key changes what it says: one row per key, and no key without a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from grpo_env.assembly import open_tasks, sampling_plan
from grpo_env.evaluation import Evaluation
from grpo_env.rollout.groups import SamplingPlan
from grpo_env.settings import EnvServerSettings
from grpo_offline.backends.choice import Sampling
from grpo_offline.items import items_to_evaluate, items_to_train
from grpo_offline.keys import OfflineKeys
from grpo_offline.sampling import evaluation_of
from grpo_offline.translate import environment_settings, trainer_command
from grpo_trainer.config.trainer import TrainerSettings
from tests.unit.offline.conftest import MakeKeys
from tests.unit.offline.test_keys import leaves


@dataclass(frozen=True)
class Effects:
    """What the loop reads of a run's keys."""

    keys: OfflineKeys
    grpo: TrainerSettings
    env: EnvServerSettings
    plan: SamplingPlan
    evaluation: Evaluation
    trained: list[str]
    evaluated: list[str]


def effects(keys: OfflineKeys, directory: Path) -> Effects:
    grpo = trainer_command(keys, Sampling("local", "local"), directory).settings()
    env = environment_settings(keys, directory)
    with open_tasks(env) as tasks:
        stream = items_to_train(tasks, keys).stream(0, 1)
        return Effects(
            keys,
            grpo,
            env,
            sampling_plan(env, tasks),
            evaluation_of(keys.eval, keys.seed),
            [stream.next().key for _ in range(100)],
            [item.key for one in items_to_evaluate(tasks, keys) for item in one.items],
        )


Read = Callable[[Effects], Any]
TABLE: dict[str, tuple[Any, Read, Any]] = {
    "model.train_id": ("OTHER", lambda e: (e.grpo.model == e.env.model, e.env.model[-5:]), "other"),
    "model.ref_id": ("OTHER", lambda e: str(e.grpo.reference_model)[-5:], "other"),
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

SEEN_IN_A_RUN = {
    "generation.backend": "test_run.py and test_choice.py",
    "eval.enabled": "test_run.py",
    "eval.interval": "test_run.py",
    "eval.backend": "test_run.py",
    "eval.base_url": "test_run.py",
    "eval.max_new_tokens": "test_run.py",
    "eval.seed_base": "test_run.py",
    "checkpoint.resume": "test_run.py and test_hydra_words.py",
    "logging.wandb.run_name": "test_hydra_words.py",
    "sync.mode": "test_choice.py",
}


def test_every_key_has_a_row() -> None:
    sections = {"grpo", "env_server"}
    assert {*leaves(OfflineKeys().model_dump())} | sections == {*TABLE} | {*SEEN_IN_A_RUN}


@pytest.mark.parametrize("name", [*TABLE])
def test_a_key_has_its_effect(
    name: str, make_keys: MakeKeys, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    value, read, expected = TABLE[name]
    if value == "OTHER":
        value = str(tmp_path / "other")
        (tmp_path / "other").symlink_to(request.getfixturevalue("model"))
    before = effects(_keys(make_keys), tmp_path)
    after = effects(_keys(make_keys, name, value), tmp_path)
    if expected is None:
        assert read(after) != read(before)
        return
    found = read(after)
    if name == "model.train_id":
        assert found == (True, expected)
        return
    assert found == expected
    assert read(before) != expected


def _keys(make_keys: MakeKeys, name: str = "", value: Any = None) -> OfflineKeys:
    sections: dict[str, Any] = {
        "model": {"device": "cpu"},
        "grpo": {"seq_len": 64},
        "env_server": {"seq_len": 64},
        "data": {"num_train_seeds": 4},
    }
    section, *rest = name.split(".")
    if rest:
        content: Any = value
        for part in reversed(rest):
            content = {part: content}
        sections[section] = {**sections.get(section, {}), **content}
    elif name:
        is_section = isinstance(value, dict)
        sections[name] = {**sections.get(name, {}), **value} if is_section else value
    return make_keys(**sections)
