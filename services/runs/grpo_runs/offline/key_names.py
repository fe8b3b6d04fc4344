"""Messages of the trainer and of the environment in the words of the user: the keys of Hydra or of
a recipe instead of options of `grpo` and `env-server`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, MutableMapping
from functools import cache
from typing import Any

from grpo_core.settings.options import options_of
from grpo_core.tree.trainer_command import CommandLine
from grpo_env.settings import EnvServerSettings

GRPO_OPTIONS: Mapping[str, str] = {
    "model": "model.train_id",
    "device": "model.device",
    "inference_url": "generation.base_url",
    "batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.grad_accum_steps",
    "lr": "train.lr",
    "max_grad_norm": "train.grad_clip",
    "kl_coef": "train.kl_coef",
    "entropy_coef": "train.entropy_coef",
    "seed": "seed",
    "keep_checkpoints": "checkpoint.keep_last_k",
    "use_wandb": "logging.wandb.enabled",
    "log_level": "logging.level",
}
"""Options of `grpo` that take the value of a key as it is."""
ENVIRONMENT_OPTIONS: Mapping[str, str] = {
    "model": "model.train_id",
    "inference_url": "generation.base_url",
    "group_size": "data.rollouts_per_problem",
    "temperature": "generation.temperature",
    "top_p": "generation.top_p",
    "top_k": "generation.top_k",
    "repetition_penalty": "generation.repetition_penalty",
    "max_completion_tokens": "generation.max_new_tokens",
    "seed": "seed",
    "eval_items": "eval.num_ids",
    "eval_samples": "eval.replicates",
    "eval_requests": "eval.batch_size",
    "log_level": "logging.level",
}
"""The same of `env-server`."""
_DERIVED = {
    "reference_model": "model.ref_id",
    "dtype": "model.dtype",
    "mode": "sync.mode",
    "steps": "train.iterations",
    "save_path": "hydra.run.dir",
    "resume": "checkpoint.resume",
    "checkpoint_interval": "checkpoint.save_interval",
    "wandb_project": "logging.wandb.project",
    "task": "data.task",
    "max_concurrent_groups": "generation.batch_size",
    "eval_temperature": "eval.temperature",
}
"""Options that `translate` derives from a key."""
KEY_OF_OPTION: Mapping[str, str] = {**GRPO_OPTIONS, **ENVIRONMENT_OPTIONS, **_DERIVED}
"""The sections `grpo` and `env_server` set all other options."""
_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*[a-z0-9])")
_LINE = re.compile(r"(grpo|env-server): (?:\S+\.yaml: )?([a-z][\w-]*)(?=:)")
_KEY = re.compile(
    r"(?<![\w./])(?:sync|train|generation|eval|data|model|checkpoint|logging|grpo|env_server|hydra)"
    r"\.[a-z_]+(?:\.[a-z_]+)*(?![\w(])"
)


def in_keys(text: str) -> str:
    """`raise --steps` → `raise train.iterations`. Options of other commands stay."""
    return _OPTION.sub(lambda found: _key_of(found[1]) or found[0], text)


def line_in_keys(line: str) -> str:
    """`grpo: out/grpo.yaml: lr: expected…` → `train.lr: expected…`."""
    found = _LINE.match(line)
    if found is None:
        return in_keys(line)
    section = found[1].replace("-", "_")
    key = _key_of(found[2], section) or f"{section}.{found[2]}"
    return in_keys(key + line[found.end() :])


def _key_of(option: str, section: str | None = None) -> str | None:
    """Args: section: where to look first"""
    name = option.replace("-", "_")
    if name in KEY_OF_OPTION:
        return KEY_OF_OPTION[name]
    sections = [one for one, names in _open().items() if name in names]
    if not sections:
        return None
    return f"{section if section in sections else sections[0]}.{name}"


@cache
def _open() -> Mapping[str, frozenset[str]]:
    """The options of each open section."""
    return {
        "grpo": frozenset(options_of(CommandLine)),
        "env_server": frozenset(options_of(EnvServerSettings)),
    }


def in_recipe(text: str, names: Mapping[str, str]) -> str:
    """`raise --steps` → `raise max_steps`. Args: names: of a recipe's keys, by those of Hydra"""
    return _KEY.sub(lambda found: names.get(found[0], found[0]), in_keys(text))


def renamed(names: Mapping[str, str]) -> Callable[..., MutableMapping[str, Any]]:
    """A processor of structlog that translates the texts of an event. Args: as `in_recipe`"""

    def translated(
        _logger: Any, _method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        texts = {name: text for name, text in event.items() if isinstance(text, str)}
        return {**event, **{name: in_recipe(text, names) for name, text in texts.items()}}

    return translated
