"""Translates a recipe to the keys of the offline trainer, by the rules that the table names."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpo_core.errors import problems_of
from grpo_runs.offline.errors import RecipeInvalid
from grpo_runs.offline.key_names import in_recipe
from grpo_runs.offline.keys import OfflineKeys, put
from grpo_runs.recipe.data import environment_options, lengths
from grpo_runs.recipe.keys import KEYS
from grpo_runs.recipe.objective import kl_coef, optimization, unused_keys
from grpo_runs.recipe.reading import TrainingRecipe
from grpo_runs.recipe.task import TASK

_MOST = 1_000_000
"""Models to keep, and training seeds: all."""
_EVAL_STEPS = 10
RUNS = Path("runs")
_LEVELS = {"passive": "WARNING", "critical": "ERROR", "detail": "DEBUG"}
LORA_MODES = ("lora_only", "lora_restart")


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
    recipe: TrainingRecipe, script: str, row_count: Callable[[], int], ranks: int = 1
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
            put(content, key.path, recipe[key.name])
    for path, value in _ruled(recipe, script, row_count, ranks).items():
        put(content, path, value)
    for section in ("grpo", "env_server"):
        content.setdefault(section, {}).update(recipe[section])
    try:
        keys = OfflineKeys.model_validate(content)
    except ValidationError as error:
        raise RecipeInvalid(in_recipe(problems_of(error), names_of_recipe())) from error
    notes = [*recipe.without_effect, *unused_keys(recipe, script)]
    return Translated(keys, run_directory(recipe, script), notes)


def run_directory(recipe: TrainingRecipe, script: str) -> Path:
    resumed = recipe["resume_from_checkpoint"]
    if isinstance(resumed, str) and resumed.lower() not in ("true", "false"):
        return Path(resumed)
    return Path(recipe["output_dir"] or RUNS / (recipe["run_name"] or script))


def base_url(recipe: TrainingRecipe) -> str:
    given = recipe["vllm_server_base_url"]
    if given is not None:
        return str(given).rstrip("/").removesuffix("/generate")
    host = recipe["vllm_server_host"]
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{recipe['vllm_server_port']}"


def dtype_of(recipe: TrainingRecipe) -> str:
    """Raises `RecipeInvalid`: two keys differ."""
    if recipe["bf16"] and recipe["fp16"]:
        raise RecipeInvalid("bf16: excludes fp16")
    mixed = "bfloat16" if recipe["bf16"] else "float16" if recipe["fp16"] else None
    return mixed or recipe["dtype"] or "auto"


def sync_mode(recipe: TrainingRecipe) -> str:
    """Raises `RecipeInvalid`: the mode does not train what `use_peft` asks for, or nothing could
    sample from an adapter."""
    mode: str = recipe["sync_mode"]
    if recipe["use_peft"] and not recipe["use_vllm"]:
        raise RecipeInvalid(
            "use_peft: an adapter is sampled by a server; start `vllm-api-server --enable-lora` at "
            f"{base_url(recipe)} and set use_vllm: true, or set use_peft: false"
        )
    if recipe["use_peft"] and mode == "auto":
        return LORA_MODES[0]
    if mode != "auto" and mode != "frozen" and recipe["use_peft"] != (mode in LORA_MODES):
        raise RecipeInvalid(
            f"sync_mode: {mode} does not fit use_peft: {str(recipe['use_peft']).lower()}; "
            f"an adapter needs {' or '.join(LORA_MODES)}"
        )
    return mode


def _ruled(
    recipe: TrainingRecipe, script: str, row_count: Callable[[], int], ranks: int
) -> dict[str, Any]:
    """Values by path, of the keys without a path of their own."""
    url = base_url(recipe)
    backend = "vllm_server" if recipe["use_vllm"] else "local"
    sizes = _sizes(recipe, row_count, ranks)
    found: dict[str, Any] = {
        "model.train_id": recipe["model_name_or_path"],
        "model.ref_id": recipe["model_name_or_path"],
        "model.dtype": dtype_of(recipe),
        "generation.backend": backend,
        "generation.base_url": url,
        "eval.backend": backend,
        "eval.base_url": url,
        "eval.max_new_tokens": recipe["max_completion_length"],
        "eval.temperature": recipe["temperature"],
        "eval.top_p": recipe["top_p"],
        "eval.enabled": recipe["eval_strategy"] != "no",
        "data.task": TASK,
        "data.train_seed_start": 0,
        "data.num_train_seeds": _MOST,
        "train.kl_coef": kl_coef(recipe),
        "train.grad_accum_steps": recipe["gradient_accumulation_steps"] * ranks,
        "checkpoint.keep_last_k": recipe["save_total_limit"] or _MOST,
        "sync.mode": sync_mode(recipe),
        "logging.level": _LEVELS.get(recipe["log_level"].lower(), recipe["log_level"].upper()),
    } | sizes
    if recipe["num_generations_eval"] is None:
        found["eval.replicates"] = recipe["num_generations"]
    if recipe["fsdp"]:
        found["grpo.fsdp"] = True
    if recipe["use_cpu"]:
        found["model.device"] = "cpu"
    found |= _logging(recipe, run_directory(recipe, script))
    steps = sizes["train.iterations"] * _steps_per_iteration(recipe, ranks)
    grpo = lengths(recipe) | _adapter(recipe) | optimization(recipe, script, steps)
    found |= {f"grpo.{name}": value for name, value in grpo.items()}
    environment = environment_options(recipe)
    return found | {f"env_server.{name}": value for name, value in environment.items()}


def _sizes(recipe: TrainingRecipe, row_count: Callable[[], int], ranks: int) -> dict[str, int]:
    """Batches, iterations and intervals, counted as the offline trainer counts.

    Raises `RecipeInvalid`: the sizes do not fit."""
    problems, steps = _problems(recipe, ranks), _steps_per_iteration(recipe, ranks)
    if recipe["max_steps"] > 0:
        iterations = -(-int(recipe["max_steps"]) // steps)
    elif recipe["num_train_epochs"] > 0:
        iterations = max(1, math.ceil(recipe["num_train_epochs"] * row_count() / problems))
    else:
        raise RecipeInvalid("num_train_epochs: expected above 0, or max_steps")
    if recipe["save_strategy"] == "steps" and recipe["save_steps"] < 1:
        raise RecipeInvalid("save_steps: expected a number of steps, not a share of the run")

    def interval(name: str, iterations: float) -> int:
        if recipe[name] not in ("no", "steps", "epoch"):
            raise RecipeInvalid(f"{name}: expected no, steps or epoch; got {recipe[name]!r}")
        return max(1, row_count() // problems if recipe[name] == "epoch" else round(iterations))

    save_interval = interval("save_strategy", recipe["save_steps"] / steps)
    every = recipe["eval_steps"] or _EVAL_STEPS
    return {
        "data.problems_per_iteration": problems,
        "generation.batch_size": problems,
        "train.iterations": iterations,
        "checkpoint.save_interval": 0 if recipe["save_strategy"] == "no" else save_interval,
        "eval.interval": interval(
            "eval_strategy", every * iterations if every < 1 else every / steps
        ),
    }


def _problems(recipe: TrainingRecipe, ranks: int) -> int:
    """Of one iteration."""
    size = recipe["num_generations"]
    per_generation = recipe["steps_per_generation"] or recipe["gradient_accumulation_steps"]
    if recipe["generation_batch_size"] is not None and recipe["steps_per_generation"] is not None:
        raise RecipeInvalid("generation_batch_size: excludes steps_per_generation")
    completions = recipe["generation_batch_size"] or (
        recipe["per_device_train_batch_size"] * ranks * per_generation
    )
    if size < 2:
        raise RecipeInvalid(f"num_generations: expected 2 or more; got {size}")
    if completions % size:
        raise RecipeInvalid(
            f"num_generations: {size} does not divide the {completions} completions of a "
            "generation; change per_device_train_batch_size, gradient_accumulation_steps or "
            "generation_batch_size"
        )
    return int(completions // size)


def _steps_per_iteration(recipe: TrainingRecipe, ranks: int) -> int:
    per_micro_batch = recipe["per_device_train_batch_size"] * ranks
    per_step = per_micro_batch * recipe["gradient_accumulation_steps"]
    return int(-(-_problems(recipe, ranks) * recipe["num_generations"] // per_step))


def names_of_recipe() -> dict[str, str]:
    """The keys of a recipe, by those of the offline trainer that they set."""
    set_as_they_are = {key.path: key.name for key in KEYS if key.path}
    return set_as_they_are | {path: key.name for key in KEYS for path in key.names}


def _logging(recipe: TrainingRecipe, directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for report in recipe["report_to"]:
        if report == "wandb":
            found["logging.wandb.enabled"] = True
        elif report == "tensorboard":
            found["grpo.tensorboard_dir"] = str(directory / "tensorboard")
        elif report != "none":
            raise RecipeInvalid(f"report_to: expected wandb, tensorboard or none; got {report!r}")
    return found


def _adapter(recipe: TrainingRecipe) -> dict[str, Any]:
    if not recipe["use_peft"]:
        return {}
    options = {name: recipe[name] for name in ("lora_r", "lora_alpha", "lora_dropout")}
    targets = recipe["lora_target_modules"]
    return options | ({"lora_target_modules": targets} if targets else {})
