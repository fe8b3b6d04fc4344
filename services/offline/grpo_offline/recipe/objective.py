"""The objective of a recipe, as options of `grpo`."""

from __future__ import annotations

from typing import Any

from grpo_offline.errors import RecipeInvalid
from grpo_offline.recipe.keys import MAXENT_NAMES, TABLE
from grpo_offline.recipe.reading import Recipe

_AGGREGATIONS = {"grpo": "sequence", "dapo": "token", "bnpo": "token", "dr_grpo": "constant"}
_CISPO = "cispo"
_CORRECTIONS = {
    f"{level}_{kind}": (kind, level)
    for level in ("token", "sequence")
    for kind in ("mask", "truncate")
}
_SCALES = {
    "group": "group_std",
    "true": "group_std",
    "none": "group_mean",
    "false": "group_mean",
}
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


def is_maxent(recipe: Recipe, script: str) -> bool:
    """Args: script: grpo or maxent, whose script runs"""
    return script == "maxent" and not recipe["train_grpo_objective"]


def unused_keys(recipe: Recipe, script: str) -> list[str]:
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


def kl_coef(recipe: Recipe) -> float:
    """Raises `RecipeInvalid`: `beta` and `init_kl_coeff` differ."""
    given = {recipe[name] for name in ("beta", "init_kl_coeff") if recipe.gives(name)} - {None}
    if len(given) > 1:
        raise RecipeInvalid("init_kl_coeff: differs from beta, which has the same meaning")
    return float(given.pop()) if given else float(recipe["beta"])


def objective_options(recipe: Recipe, script: str, warmup_steps: int) -> dict[str, Any]:
    """Args: warmup_steps: of the learning rate

    Raises `RecipeInvalid`: a value is not supported."""
    own = _maxent(recipe, warmup_steps) if is_maxent(recipe, script) else _grpo(recipe)
    return own | _kl_control(recipe)


def _kl_control(recipe: Recipe) -> dict[str, Any]:
    target, horizon = recipe["kl_target"], recipe["kl_horizon"]
    if not target or not horizon:
        return {}
    if not kl_coef(recipe):
        raise RecipeInvalid("kl_target: needs init_kl_coeff or beta above 0, which it changes")
    return {"kl_control": "adaptive", "kl_target": target, "kl_horizon": horizon}


def _maxent(recipe: Recipe, warmup_steps: int) -> dict[str, Any]:
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


def _grpo(recipe: Recipe) -> dict[str, Any]:
    loss = recipe["loss_type"]
    options: dict[str, Any] = {
        "advantage": _advantage(recipe["scale_rewards"]),
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


def _advantage(scale: str | bool) -> str:
    name = str(scale).lower()
    if name not in _SCALES:
        raise RecipeInvalid(
            f"scale_rewards: expected group or none; got {scale!r}. TRL's batch centres by group "
            "and scales by batch, which is not supported"
        )
    return _SCALES[name]


def _correction(recipe: Recipe) -> dict[str, Any]:
    cap, mode = recipe["vllm_importance_sampling_clip_max"], recipe["vllm_importance_sampling_mode"]
    if not recipe["vllm_importance_sampling_correction"] or cap is None:
        return {"importance_correction": "none"}
    if mode not in _CORRECTIONS:
        raise RecipeInvalid(
            f"vllm_importance_sampling_mode: expected one of {', '.join(_CORRECTIONS)}; got {mode}"
        )
    kind, level = _CORRECTIONS[mode]
    return {
        "importance_correction": kind,
        "importance_correction_level": level,
        "importance_correction_cap": cap,
    }
