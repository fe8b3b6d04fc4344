"""Translates a recipe to the keys of the offline trainer, by the rules that the table names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpo_core.validation import problems_of
from grpo_offline.errors import RecipeInvalid
from grpo_offline.key_names import in_recipe
from grpo_offline.keys import OfflineKeys
from grpo_offline.recipe.data import environment_options, lengths
from grpo_offline.recipe.keys import KEYS
from grpo_offline.recipe.objective import kl_coef, objective_options, unused_keys
from grpo_offline.recipe.reading import Recipe
from grpo_offline.recipe.task import TASK

_MOST = 1_000_000
"""Models to keep, and training seeds: all."""
_EVAL_STEPS = 10
EVERY_ROW = _MOST


@dataclass(frozen=True)
class Sizes:
    """Args:
    steps: optimizer steps of the run
    save_interval, eval_interval: in iterations; save_interval 0: only the last model
    """

    problems: int
    iterations: int
    steps: int
    save_interval: int
    eval_interval: int
    keep: int


def sizes_of(recipe: Recipe, row_count: Callable[[], int], ranks: int = 1) -> Sizes:
    """Args:
        row_count: number of rows of training, which may take long to find
        ranks: number of training processes, each with its share of a step

    Raises `RecipeInvalid`: the sizes do not fit.
    """
    problems = _problems(recipe, ranks)
    device = recipe["per_device_train_batch_size"] * ranks
    per_step = device * recipe["gradient_accumulation_steps"]
    steps = -(-problems * recipe["num_generations"] // per_step)
    iterations = _iterations(recipe, problems, steps, row_count)
    return Sizes(
        problems,
        iterations,
        iterations * steps,
        _save_interval(recipe, problems, steps, row_count),
        _eval_interval(recipe, problems, steps, iterations, row_count),
        recipe["save_total_limit"] or _MOST,
    )


def _problems(recipe: Recipe, ranks: int) -> int:
    device, size = recipe["per_device_train_batch_size"] * ranks, recipe["num_generations"]
    per_generation = recipe["steps_per_generation"] or recipe["gradient_accumulation_steps"]
    if recipe["generation_batch_size"] is not None and recipe["steps_per_generation"] is not None:
        raise RecipeInvalid("generation_batch_size: excludes steps_per_generation")
    completions = recipe["generation_batch_size"] or device * per_generation
    if size < 2:
        raise RecipeInvalid(f"num_generations: expected 2 or more; got {size}")
    if completions % size:
        raise RecipeInvalid(
            f"num_generations: {size} does not divide the {completions} completions of a "
            "generation; change per_device_train_batch_size, gradient_accumulation_steps or "
            "generation_batch_size"
        )
    return int(completions // size)


def _iterations(recipe: Recipe, problems: int, steps: int, row_count: Callable[[], int]) -> int:
    if recipe["max_steps"] > 0:
        return -(-int(recipe["max_steps"]) // steps)
    if recipe["num_train_epochs"] <= 0:
        raise RecipeInvalid("num_train_epochs: expected above 0, or max_steps")
    return int(max(1, math.ceil(recipe["num_train_epochs"] * row_count() / problems)))


def _save_interval(recipe: Recipe, problems: int, steps: int, row_count: Callable[[], int]) -> int:
    strategy = recipe["save_strategy"]
    if strategy == "no":
        return 0
    if strategy == "epoch":
        return int(max(1, row_count() // problems))
    _require("save_strategy", strategy, "no, steps or epoch", "steps")
    if recipe["save_steps"] < 1:
        raise RecipeInvalid("save_steps: expected a number of steps, not a share of the run")
    return int(max(1, round(recipe["save_steps"] / steps)))


def _eval_interval(
    recipe: Recipe, problems: int, steps: int, iterations: int, row_count: Callable[[], int]
) -> int:
    strategy = recipe["eval_strategy"]
    if strategy == "epoch":
        return int(max(1, row_count() // problems))
    _require("eval_strategy", strategy, "no, steps or epoch", "no", "steps")
    every = recipe["eval_steps"] or _EVAL_STEPS
    return int(max(1, round(every * iterations if every < 1 else every / steps)))


def _require(name: str, value: str, expected: str, *allowed: str) -> None:
    if value not in allowed:
        raise RecipeInvalid(f"{name}: expected {expected}; got {value!r}")


RUNS = Path("runs")
_LEVELS = {"passive": "WARNING", "critical": "ERROR", "detail": "DEBUG"}
_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "adamw_8bit": "adamw_8bit",
    "adafactor": "adafactor",
}
_SCHEDULES = {"constant_with_warmup": "constant"} | {
    name: name for name in ("linear", "cosine", "constant")
}
_LORA_MODES = ("lora_only", "lora_restart")


@dataclass(frozen=True)
class Translated:
    """What a recipe asks of the offline trainer.

    Args:
        directory: of the run
        notes: a line per given key that changes nothing
    """

    keys: OfflineKeys
    directory: Path
    notes: list[str]


def translate(
    recipe: Recipe, script: str, row_count: Callable[[], int], ranks: int = 1
) -> Translated:
    """Args:
        script: grpo or maxent, whose script runs
        row_count: number of rows of training, which may take long to find
        ranks: number of training processes

    Raises:
        RecipeInvalid: values are missing, not supported or exclude each other.
    """
    if not recipe["model_name_or_path"]:
        raise RecipeInvalid("model_name_or_path is required")
    content: dict[str, Any] = {}
    for key in KEYS:
        if key.path and (recipe[key.name] is not None):
            _put(content, key.path, recipe[key.name])
    for path, value in _ruled(recipe, script, row_count, ranks).items():
        _put(content, path, value)
    for section in ("grpo", "env_server"):
        content.setdefault(section, {}).update(recipe[section])
    try:
        keys = OfflineKeys.model_validate(content)
    except ValidationError as error:
        raise RecipeInvalid(in_recipe(problems_of(error), names_of_recipe())) from error
    notes = [*recipe.without_effect, *unused_keys(recipe, script)]
    return Translated(keys, run_directory(recipe, script), notes)


def run_directory(recipe: Recipe, script: str) -> Path:
    resumed = recipe["resume_from_checkpoint"]
    if isinstance(resumed, str) and resumed.lower() not in ("true", "false"):
        return Path(resumed)
    return Path(recipe["output_dir"] or RUNS / (recipe["run_name"] or script))


def base_url(recipe: Recipe) -> str:
    given = recipe["vllm_server_base_url"]
    if given is not None:
        return str(given).rstrip("/").removesuffix("/generate")
    host = recipe["vllm_server_host"]
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{recipe['vllm_server_port']}"


def dtype_of(recipe: Recipe) -> str:
    """Raises `RecipeInvalid`: two keys differ."""
    if recipe["bf16"] and recipe["fp16"]:
        raise RecipeInvalid("bf16: excludes fp16")
    mixed = "bfloat16" if recipe["bf16"] else "float16" if recipe["fp16"] else None
    return mixed or recipe["dtype"] or "auto"


def sync_mode(recipe: Recipe) -> str:
    """Raises `RecipeInvalid`: the mode does not train what `use_peft` asks for, or nothing could
    sample from an adapter."""
    mode: str = recipe["sync_mode"]
    if recipe["use_peft"] and not recipe["use_vllm"]:
        raise RecipeInvalid(
            "use_peft: an adapter is sampled by a server; start `vllm-api-server --enable-lora` at "
            f"{base_url(recipe)} and set use_vllm: true, or set use_peft: false"
        )
    if recipe["use_peft"] and mode == "auto":
        return _LORA_MODES[0]
    if mode != "auto" and mode != "frozen" and recipe["use_peft"] != (mode in _LORA_MODES):
        raise RecipeInvalid(
            f"sync_mode: {mode} does not fit use_peft: {str(recipe['use_peft']).lower()}; "
            f"an adapter needs {' or '.join(_LORA_MODES)}"
        )
    return mode


def _ruled(recipe: Recipe, script: str, row_count: Callable[[], int], ranks: int) -> dict[str, Any]:
    """Values by path, of the keys without a path of their own."""
    evaluates = recipe["eval_strategy"] != "no"
    sizes = sizes_of(recipe, row_count, ranks)
    url = base_url(recipe)
    backend = "vllm_server" if recipe["use_vllm"] else "local"
    found: dict[str, Any] = {
        "model.train_id": recipe["model_name_or_path"],
        "model.ref_id": recipe["model_name_or_path"],
        "model.dtype": dtype_of(recipe),
        "generation.backend": backend,
        "generation.base_url": url,
        "generation.batch_size": sizes.problems,
        "eval.backend": backend,
        "eval.base_url": url,
        "eval.max_new_tokens": recipe["max_completion_length"],
        "eval.temperature": recipe["temperature"],
        "eval.top_p": recipe["top_p"],
        "eval.enabled": evaluates,
        "eval.interval": sizes.eval_interval,
        "data.task": TASK,
        "data.problems_per_iteration": sizes.problems,
        "data.train_seed_start": 0,
        "data.num_train_seeds": EVERY_ROW,
        "train.iterations": sizes.iterations,
        "train.kl_coef": kl_coef(recipe),
        "train.grad_accum_steps": recipe["gradient_accumulation_steps"] * ranks,
        "checkpoint.save_interval": sizes.save_interval,
        "checkpoint.keep_last_k": sizes.keep,
        "sync.mode": sync_mode(recipe),
        "logging.level": _level(recipe["log_level"]),
    }
    if recipe["num_generations_eval"] is None:
        found["eval.replicates"] = recipe["num_generations"]
    if recipe["fsdp"]:
        found["grpo.fsdp"] = True
    if recipe["use_cpu"]:
        found["model.device"] = "cpu"
    found |= _logging(recipe, run_directory(recipe, script))
    grpo = (
        lengths(recipe)
        | _optimizer(recipe)
        | _adapter(recipe)
        | objective_options(recipe, script, _warmup_steps(recipe, sizes.steps))
    )
    found |= {f"grpo.{name}": value for name, value in grpo.items()}
    environment = environment_options(recipe)
    return found | {f"env_server.{name}": value for name, value in environment.items()}


def names_of_recipe() -> dict[str, str]:
    """The keys of a recipe, by those of the offline trainer that they set."""
    set_as_they_are = {key.path: key.name for key in KEYS if key.path}
    return set_as_they_are | {path: key.name for key in KEYS for path in key.names}


def _level(name: str) -> str:
    return _LEVELS.get(name.lower(), name.upper())


def _logging(recipe: Recipe, directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for report in recipe["report_to"]:
        if report == "wandb":
            found["logging.wandb.enabled"] = True
        elif report == "tensorboard":
            found["grpo.tensorboard_dir"] = str(directory / "tensorboard")
        elif report != "none":
            raise RecipeInvalid(f"report_to: expected wandb, tensorboard or none; got {report!r}")
    return found


def _optimizer(recipe: Recipe) -> dict[str, Any]:
    options: dict[str, Any] = {
        "optimizer": _one_of(recipe, "optim", _OPTIMIZERS),
        "lr_schedule": _one_of(recipe, "lr_scheduler_type", _SCHEDULES),
    }
    warmup, ratio = recipe["warmup_steps"], recipe["warmup_ratio"]
    if warmup and ratio:
        raise RecipeInvalid("warmup_ratio: excludes warmup_steps")
    if ratio or 0 < warmup < 1:
        options["warmup_ratio"] = ratio or warmup
    else:
        options["warmup_steps"] = int(warmup)
    if recipe["optim"] == "adafactor":  # grpo refuses options of another optimizer
        for name in ("adam_beta1", "adam_beta2", "adam_epsilon"):
            if recipe.gives(name):
                raise RecipeInvalid(f"{name}: has no effect on optim: adafactor")
    return options


def _warmup_steps(recipe: Recipe, steps: int) -> int:
    """As `grpo` counts them. Args: steps: optimizer steps of the run"""
    warmup, ratio = recipe["warmup_steps"], recipe["warmup_ratio"]
    is_share = ratio or warmup < 1
    return math.ceil((ratio or warmup) * steps) if is_share else int(warmup)


def _adapter(recipe: Recipe) -> dict[str, Any]:
    if not recipe["use_peft"]:
        return {}
    options = {name: recipe[name] for name in ("lora_r", "lora_alpha", "lora_dropout")}
    targets = recipe["lora_target_modules"]
    return options | ({"lora_target_modules": targets} if targets else {})


def _one_of(recipe: Recipe, name: str, choices: Mapping[str, str]) -> str:
    value = str(recipe[name])
    if value not in choices:
        raise RecipeInvalid(f"{name}: expected one of {', '.join(choices)}; got {value!r}")
    return choices[value]


def _put(content: dict[str, Any], path: str, value: Any) -> None:
    *sections, name = path.split(".")
    for section in sections:
        content = content.setdefault(section, {})
    content[name] = value
