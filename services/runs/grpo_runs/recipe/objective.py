"""The objective and the optimizer of a recipe, as options of `grpo`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from grpo_runs.offline.errors import RecipeInvalid
from grpo_runs.recipe.keys import MAXENT_NAMES, TABLE
from grpo_runs.recipe.reading import TrainingRecipe

T = TypeVar("T")

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
_AGGREGATIONS = {"grpo": "sequence", "dapo": "token", "bnpo": "token", "dr_grpo": "constant"}
_CISPO = "cispo"
_CORRECTIONS = {
    f"{level}_{kind}": (kind, level)
    for level in ("token", "sequence")
    for kind in ("mask", "truncate")
}
_SCALES = dict.fromkeys(("group", "true"), "group_std") | dict.fromkeys(
    ("none", "false"), "group_mean"
)
_BATCH_SCALES = ". TRL's batch centres by group and scales by batch, which is not supported"
_ONLY_GRPO = (
    "loss_type",
    "scale_rewards",
    "epsilon",
    "epsilon_high",
    "importance_sampling_level",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max",
    "use_bias_correction_kl",
)
"""Keys of parts that the objective of MaxEnt-GRPO does not have."""


def is_maxent(recipe: TrainingRecipe, script: str) -> bool:
    """Args: script: grpo or maxent, whose script runs"""
    return script == "maxent" and not recipe["train_grpo_objective"]


def unused_keys(recipe: TrainingRecipe, script: str) -> list[str]:
    """Given keys that the objective has no use for, each with the reason."""
    if is_maxent(recipe, script):
        unused = [*_ONLY_GRPO]
        if not kl_coef(recipe):
            unused.append("maxent_length_normalize_ref")
        reason = "MaxEnt-GRPO has no such part"
    else:
        unused = sorted(MAXENT_NAMES - {"train_grpo_objective"})
        reason = "only src/maxent-grpo.py uses it"
    return [
        f"{name}: {reason}" for name in unused if recipe.gives(name) and TABLE[name].use == "used"
    ]


def kl_coef(recipe: TrainingRecipe) -> float:
    """Raises `RecipeInvalid`: `beta` and `init_kl_coeff` differ."""
    given = {recipe[name] for name in ("beta", "init_kl_coeff") if recipe.gives(name)} - {None}
    if len(given) > 1:
        raise RecipeInvalid("init_kl_coeff: differs from beta, which has the same meaning")
    return float(given.pop()) if given else float(recipe["beta"])


def optimization(recipe: TrainingRecipe, script: str, steps: int) -> dict[str, Any]:
    """Options of the optimizer and of the objective. Args: steps: optimizer steps of the run

    Raises `RecipeInvalid`: a value is not supported."""
    options = _optimizer(recipe)
    if is_maxent(recipe, script):
        options |= _maxent(recipe, _warmup_steps(recipe, steps))
    else:
        options |= _grpo(recipe)
    return options | _kl_control(recipe)


def _optimizer(recipe: TrainingRecipe) -> dict[str, Any]:
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
    if options["optimizer"] == "adafactor":  # grpo refuses options of another optimizer
        for name in ("adam_beta1", "adam_beta2", "adam_epsilon"):
            if recipe.gives(name):
                raise RecipeInvalid(f"{name}: has no effect on optim: adafactor")
    return options


def _warmup_steps(recipe: TrainingRecipe, steps: int) -> int:
    """As `grpo` counts them. Args: steps: optimizer steps of the run"""
    warmup, ratio = recipe["warmup_steps"], recipe["warmup_ratio"]
    is_share = ratio or warmup < 1
    return math.ceil((ratio or warmup) * steps) if is_share else int(warmup)


def _kl_control(recipe: TrainingRecipe) -> dict[str, Any]:
    target, horizon = recipe["kl_target"], recipe["kl_horizon"]
    if not target or not horizon:
        return {}
    if not kl_coef(recipe):
        raise RecipeInvalid("kl_target: needs init_kl_coeff or beta above 0, which it changes")
    return {"kl_control": "adaptive", "kl_target": target, "kl_horizon": horizon}


def _maxent(recipe: TrainingRecipe, warmup_steps: int) -> dict[str, Any]:
    """Args: warmup_steps: of the learning rate"""
    options: dict[str, Any] = {
        "objective": "maxent",
        "maxent_tau": recipe["maxent_tau"],
        "maxent_q_temperature": recipe["maxent_q_temperature"],
        "maxent_q_epsilon": recipe["maxent_q_epsilon"],
    }
    if kl_coef(recipe):
        options["maxent_length_normalize_ref"] = recipe["maxent_length_normalize_ref"]
    if recipe["maxent_target_entropy"] is not None:
        warmup = recipe["maxent_tau_warmup_steps"]
        options |= {
            "maxent_target_entropy": recipe["maxent_target_entropy"],
            "maxent_tau_lr": recipe["maxent_tau_lr"],
            "maxent_tau_warmup_steps": warmup_steps if warmup < 0 else warmup,
        }
    return options


def _grpo(recipe: TrainingRecipe) -> dict[str, Any]:
    loss = recipe["loss_type"]
    options: dict[str, Any] = {
        "advantage": _one_of(recipe, "scale_rewards", _SCALES, _BATCH_SCALES),
        "importance_level": recipe["importance_sampling_level"],
    }
    if loss == _CISPO:
        options["objective"] = _CISPO
        highest = recipe["epsilon_high"]  # TRL: torch.clamp(ratio, max=epsilon_high)
        if highest is not None and highest <= 1:
            raise RecipeInvalid(
                f"epsilon_high: with loss_type cispo it is the highest importance ratio, so it is "
                f"above 1, for example 5.0; got {highest:g}"
            )
        options |= {} if highest is None else {"clip_eps_high": highest - 1.0}
    elif loss in _AGGREGATIONS:
        options["aggregation"] = _AGGREGATIONS[loss]
        if loss == "dr_grpo":
            options["aggregation_tokens"] = recipe["max_completion_length"]
        high = recipe["epsilon_high"]
        options["clip_eps"] = recipe["epsilon"]
        options["clip_eps_high"] = recipe["epsilon"] if high is None else high
    else:
        known = ", ".join([*_AGGREGATIONS, _CISPO])
        raise RecipeInvalid(f"loss_type: expected one of {known}; got {loss!r}")
    if kl_coef(recipe):
        options["kl_estimator"] = "k2" if recipe["use_bias_correction_kl"] else "k3"
    return options | _correction(recipe)


def _correction(recipe: TrainingRecipe) -> dict[str, Any]:
    cap = recipe["vllm_importance_sampling_clip_max"]
    if not recipe["vllm_importance_sampling_correction"] or cap is None:
        return {"importance_correction": "none"}
    kind, level = _one_of(recipe, "vllm_importance_sampling_mode", _CORRECTIONS)
    return {
        "importance_correction": kind,
        "importance_correction_level": level,
        "importance_correction_cap": cap,
    }


def _one_of(recipe: TrainingRecipe, name: str, choices: Mapping[str, T], note: str = "") -> T:
    value = str(recipe[name]).lower()
    if value not in choices:
        known = ", ".join(choices)
        raise RecipeInvalid(f"{name}: expected one of {known}; got {recipe[name]!r}{note}")
    return choices[value]
