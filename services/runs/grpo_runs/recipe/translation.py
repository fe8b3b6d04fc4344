"""Translates a recipe to the keys of the offline trainer: what `keys.yaml` says of each key, and
the rules that take several keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpo_core.errors import message_of
from grpo_core.listening import url_on_this_host
from grpo_core.settings import Mistake
from grpo_runs.offline.errors import RecipeInvalid
from grpo_runs.offline.keys import SECTIONS, OfflineKeys, in_recipe, put
from grpo_runs.recipe.data import Found, environment_options
from grpo_runs.recipe.keys import MAIN_KEYS, TABLE, TrainingRecipe

RUNS = Path("runs")
LORA_MODES = ("lora_only", "lora_restart")
_MOST = 1_000_000
"""Models to keep, and training seeds: all."""
_EVAL_STEPS = 10
_COUNTS = ("num_train_epochs", "warmup_ratio", "warmup_steps", "eval_steps", "save_steps")
_SHARDED = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "accelerate's FSDP; write `fsdp: full_shard` in the recipe",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}


def rank_count(environment: Mapping[str, str]) -> int:
    """Number of the training processes that accelerate or torchrun has started.

    Raises `RecipeInvalid`: accelerate shards the model."""
    for variable, name in _SHARDED.items():
        if environment.get(variable, "").lower() == "true":
            raise RecipeInvalid(
                f"{variable}: the trainer does not use {name}; pass the --config_file "
                "recipes/accelerate_configs/ranks.yaml"
            )
    return int(environment.get("WORLD_SIZE", "1"))


def translate(
    recipe: TrainingRecipe, row_count: Callable[[Mapping[str, Any]], int], ranks: int = 1
) -> OfflineKeys:
    """Set the keys of the offline trainer that mean the same.

    Args:
        row_count: number of rows of training, by options of the environment; it may take long
        ranks: number of training processes

    Raises:
        RecipeInvalid: it lists values that are missing, not supported or exclude each other.
    """
    content: dict[str, Any] = {}
    mistakes: list[Mistake] = []
    if endless := [name for name in _COUNTS if not math.isfinite(recipe[name] or 0)]:
        recipe.require_valid([Mistake(name, "expected a finite number") for name in endless])

    @cache
    def rows() -> int:
        is_valid = not (mistakes or recipe.mistakes)
        return row_count(content["env_server"] | recipe["env_server"]) if is_valid else 1

    unmet = _unmet_conditions(recipe)
    for found in chain(
        _of_table(recipe, unmet),
        _run(recipe),
        _model(recipe),
        _optimizer(recipe),
        _objective(recipe, unmet),
        environment_options(recipe),
        _batches(recipe, ranks),
        _lengths(recipe, content, rows),
    ):
        if isinstance(found, Mistake):
            mistakes.append(found)
        else:
            put(content, *found)
    for section in SECTIONS:
        content.setdefault(section, {}).update(recipe[section])
    try:
        keys = OfflineKeys.model_validate(content)
    except ValidationError as error:
        names = names_of(recipe)
        for problem in error.errors():
            path = ".".join(map(str, problem["loc"]))
            text = in_recipe(message_of(problem), names)
            mistakes.append(Mistake(names.get(path, path), text))
    recipe.require_valid(mistakes)
    return keys


def names_of(recipe: TrainingRecipe | None = None) -> dict[str, str]:
    """The keys of a recipe, given ones first, by those of the offline trainer that they set."""
    keys = MAIN_KEYS if recipe is None else recipe.keys_in_order()
    return {path: key.name for key in keys for path in key.names}


def run_directory(recipe: TrainingRecipe) -> Path:
    resumed = recipe["resume_from_checkpoint"]
    if isinstance(resumed, str) and resumed.lower() not in ("true", "false"):
        return Path(resumed)
    return Path(recipe["output_dir"] or RUNS / (recipe["run_name"] or recipe.script))


def sync_mode(recipe: TrainingRecipe) -> str:
    is_free = recipe["use_peft"] and recipe["sync_mode"] == "auto"
    return LORA_MODES[0] if is_free else str(recipe["sync_mode"])


def notes(recipe: TrainingRecipe) -> Iterator[str]:
    """A line per given key that changes nothing."""
    unmet = _unmet_conditions(recipe)
    for name, value in recipe.given.items():
        key = TABLE[name]
        reasons = [reason for condition, reason in unmet.items() if condition in key.conditions]
        is_of_other_method = key.conditions & unmet.keys() & {"grpo", "maxent"}
        if key.use == "without effect":
            yield f"{name}: {key.text}"
        elif is_of_other_method or (reasons and value):
            yield f"{name}: {reasons[0]}"


def _unmet_conditions(recipe: TrainingRecipe) -> dict[str, str]:
    """The conditions of `keys.yaml` that do not hold, each with the reason."""
    is_maxent = recipe.script == "maxent" and not recipe["train_grpo_objective"]
    corrects = recipe["vllm_importance_sampling_correction"]
    has_cap = recipe["vllm_importance_sampling_clip_max"] is not None
    is_adaptive = recipe["kl_target"] and recipe["kl_horizon"]
    first = recipe["init_kl_coeff"]
    kl_coef = recipe["beta"] if first is None else first
    conditions = {
        "grpo": (not is_maxent, "MaxEnt-GRPO has no such part"),
        "maxent": (is_maxent, "only src/maxent-grpo.py uses it"),
        "kl": (kl_coef > 0, "needs beta or init_kl_coeff above 0"),
        "adaptive": (is_adaptive, "needs kl_target and kl_horizon above 0"),
        "clipped": (recipe["loss_type"].lower() != "cispo", "loss_type cispo has no such bound"),
        "corrected": (corrects and has_cap, "importance ratios are not corrected"),
        "target": (recipe["maxent_target_entropy"] is not None, "needs maxent_target_entropy"),
        "adapter": (recipe["use_peft"], "needs use_peft"),
    }
    return {name: reason for name, (holds, reason) in conditions.items() if not holds}


def _of_table(recipe: TrainingRecipe, unmet: Mapping[str, str]) -> Found:
    for key in recipe.keys_in_order():
        value = recipe[key.name]
        if value is None or value == [] or key.conditions & unmet.keys():
            continue
        yield from ((path, value) for path in key.paths)
        if key.words:
            found = key.words.get(str(value).lower())
            if isinstance(found, str):
                yield Mistake(key.name, f"{value!r} is not supported: {found}")
            elif found is None:
                known = [word for word, sets in key.words.items() if not isinstance(sets, str)]
                yield Mistake(key.name, f"expected one of {', '.join(known)}; got {value!r}")
            else:
                yield from found.items()


def _run(recipe: TrainingRecipe) -> Found:
    yield "data.train_seed_start", 0
    yield "data.num_train_seeds", _MOST
    yield "checkpoint.keep_last_k", recipe["save_total_limit"] or _MOST
    yield "generation.base_url", _base_url(recipe)
    yield "eval.base_url", _base_url(recipe)
    for report in recipe["report_to"]:
        if report == "wandb":
            yield "logging.wandb.enabled", True
        elif report == "tensorboard":
            yield "grpo.tensorboard_dir", str(run_directory(recipe) / "tensorboard")
        elif report == "trackio":
            yield "grpo.report_to", ["trackio"]
            if not recipe["wandb_project"]:
                yield "logging.wandb.project", recipe["project"]
        elif report != "none":
            known = "wandb, tensorboard, trackio or none"
            yield Mistake("report_to", f"expected {known}; got {report!r}")
    if recipe["fsdp"]:
        yield "grpo.fsdp", True


def _base_url(recipe: TrainingRecipe) -> str:
    given = recipe["vllm_server_base_url"]
    if given is not None:
        return str(given).rstrip("/").removesuffix("/generate")
    return url_on_this_host(recipe["vllm_server_host"], recipe["vllm_server_port"])


def _model(recipe: TrainingRecipe) -> Found:
    """The mode must train what `use_peft` asks for, and something must sample from an adapter."""
    if not recipe["model_name_or_path"]:
        yield Mistake("model_name_or_path", "a model is required")
    if recipe["bf16"] and recipe["fp16"]:
        yield Mistake("bf16", "excludes fp16")
    mode, is_adapter = sync_mode(recipe), recipe["use_peft"]
    yield "sync.mode", mode
    if is_adapter and not recipe["use_vllm"]:
        yield Mistake(
            "use_peft",
            "an adapter is sampled by a server; start `vllm-api-server --enable-lora` at "
            f"{_base_url(recipe)} and set use_vllm: true, or set use_peft: false",
        )
    elif mode not in ("auto", "frozen") and is_adapter != (mode in LORA_MODES):
        yield Mistake(
            "sync_mode",
            f"{mode} does not fit use_peft: {str(is_adapter).lower()}; an adapter needs "
            f"{' or '.join(LORA_MODES)}",
        )


def _optimizer(recipe: TrainingRecipe) -> Found:
    warmup, ratio = recipe["warmup_steps"], recipe["warmup_ratio"]
    if warmup and ratio:
        yield Mistake("warmup_ratio", "excludes warmup_steps")
    if ratio or 0 < warmup < 1:
        yield "grpo.warmup_ratio", ratio or warmup
    else:
        yield "grpo.warmup_steps", int(warmup)
    if recipe["optim"].lower() == "adafactor":  # grpo refuses options of another optimizer
        for name in ("adam_beta1", "adam_beta2", "adam_epsilon"):
            if name in recipe.given:
                yield Mistake(name, "has no effect on optim: adafactor")


def _objective(recipe: TrainingRecipe, unmet: Mapping[str, str]) -> Found:
    first = recipe["init_kl_coeff"]
    if first is not None and "beta" in recipe.given and recipe["beta"] != first:
        yield Mistake("init_kl_coeff", "differs from beta, which has the same meaning")
    if "adaptive" not in unmet:
        yield "grpo.kl_control", "adaptive"
        if "kl" in unmet:
            yield Mistake("kl_target", "needs init_kl_coeff or beta above 0, which it changes")
    if "grpo" in unmet:
        yield "grpo.objective", "maxent"
        return
    if "corrected" in unmet:
        yield "grpo.importance_correction", "none"
    if recipe["loss_type"].lower() == "dr_grpo":
        yield "grpo.aggregation_tokens", recipe["max_completion_length"]
    highest = recipe["epsilon_high"]  # of cispo in TRL: torch.clamp(ratio, max=epsilon_high)
    if "clipped" in unmet and highest is not None:
        yield "grpo.clip_eps_high", highest - 1.0
        if highest <= 1:
            yield Mistake(
                "epsilon_high",
                "with loss_type cispo it is the highest importance ratio, so it is above 1, for "
                f"example 5.0; got {highest:g}",
            )


def _batches(recipe: TrainingRecipe, ranks: int) -> Found:
    size, accumulated = recipe["num_generations"], recipe["gradient_accumulation_steps"]
    per_generation, completions = recipe["steps_per_generation"], recipe["generation_batch_size"]
    yield "train.grad_accum_steps", accumulated * ranks
    if completions is not None and per_generation is not None:
        yield Mistake("generation_batch_size", "excludes steps_per_generation")
    if recipe["max_completion_length"] is None:
        yield Mistake("max_completion_length", "a length is required")
    micro_batch = recipe["per_device_train_batch_size"] * ranks
    completions = completions or micro_batch * (per_generation or accumulated)
    if size is None or size < 2:
        yield Mistake("num_generations", f"expected 2 or more; got {size}")
    elif completions < size or completions % size:
        yield Mistake(
            "num_generations",
            f"{size} does not divide the {completions} completions of a generation; change "
            "per_device_train_batch_size, gradient_accumulation_steps or generation_batch_size",
        )
    else:
        yield "data.problems_per_iteration", completions // size
        yield "generation.batch_size", completions // size


def _lengths(recipe: TrainingRecipe, content: Mapping[str, Any], rows: Callable[[], int]) -> Found:
    """Iterations and intervals, counted as the offline trainer counts. Args: content: so far"""
    problems = content["data"].get("problems_per_iteration", 0)
    per_step = recipe["per_device_train_batch_size"] * content["train"]["grad_accum_steps"]
    if problems < 1 or per_step < 1:
        return  # a mistake in the sizes of batches
    steps = -(-problems * recipe["num_generations"] // per_step)  # of one iteration
    iterations = max(1, -(-recipe["max_steps"] // steps))
    if recipe["max_steps"] <= 0:
        iterations = max(1, math.ceil(recipe["num_train_epochs"] * rows() / problems))
        if recipe["num_train_epochs"] <= 0:
            yield Mistake("num_train_epochs", "expected above 0, or max_steps")
    yield "train.iterations", iterations
    if content["grpo"].get("maxent_tau_warmup_steps", 0) < 0:  # those of the learning rate
        warmup = recipe["warmup_ratio"] or recipe["warmup_steps"]
        is_share = recipe["warmup_ratio"] or warmup < 1
        count = math.ceil(warmup * iterations * steps) if is_share else int(warmup)
        yield "grpo.maxent_tau_warmup_steps", count
    every = recipe["eval_steps"] or _EVAL_STEPS
    evaluates = every * iterations if every < 1 else every / steps
    saves = recipe["save_steps"] / steps
    if recipe["save_strategy"] == "steps" and recipe["save_steps"] < 1:
        yield Mistake("save_steps", "expected a number of steps, not a share of the run")

    def interval(strategy: str, iterations: float) -> int:
        return max(1, rows() // problems if strategy == "epoch" else round(iterations))

    yield "eval.interval", interval(recipe["eval_strategy"], evaluates)
    if recipe["save_strategy"] != "no":
        yield "checkpoint.save_interval", interval(recipe["save_strategy"], saves)
