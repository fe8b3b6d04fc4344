"""Keys that TRL does not have: those of the training guide, of older TRL, and our own."""

from __future__ import annotations

from typing import Any

from grpo_offline.recipe.key import Key, alias, idle, refused, ruled, used
from grpo_offline.recipe.keys_grpo import GRPO_KEYS
from grpo_offline.recipe.keys_model import MODEL_KEYS
from grpo_offline.recipe.keys_training import TRAINING_KEYS

_OF_TRL = {key.name: key for key in (*TRAINING_KEYS, *GRPO_KEYS, *MODEL_KEYS)}
_CLIP = "src/maxent-grpo.py has no clipped objective; src/grpo.py has"
_BOUNDS = "tau stays between 0.001 and 10"
_ROUNDS = "a request returns all completions of a prompt, with their logprobs"

MAXENT_KEYS: tuple[Key, ...] = (
    ruled("maxent_tau", float, 0.0, "`grpo.maxent_tau`"),
    ruled("maxent_q_temperature", float, 1.0, "`grpo.maxent_q_temperature`"),
    ruled("maxent_q_epsilon", float, 1e-6, "`grpo.maxent_q_epsilon`"),
    ruled("maxent_length_normalize_ref", bool, True, "`grpo.maxent_length_normalize_ref`"),
    ruled("maxent_target_entropy", float | None, None, "`grpo.maxent_target_entropy`"),
    ruled("maxent_tau_lr", float, 0.01, "`grpo.maxent_tau_lr`"),
    ruled(
        "maxent_tau_warmup_steps",
        int,
        0,
        "`grpo.maxent_tau_warmup_steps`; -1: those of the learning rate",
    ),
    refused("maxent_tau_min", float | None, None, _BOUNDS, 0.0, 0.001),
    refused("maxent_tau_max", float | None, None, _BOUNDS, 0.0, 10.0),
    ruled(
        "train_grpo_objective",
        bool,
        False,
        "`grpo.objective`: true: src/maxent-grpo.py trains with GRPO's",
    ),
    idle("maxent_logprob_chunk_size", int, 0, "micro-batches bound the memory"),
    refused("maxent_use_clip_objective", bool, False, _CLIP),
    idle("maxent_clip_objective_coef", float, 1.0, _CLIP),
    idle("maxent_clip_adv_baseline", float | None, None, _CLIP),
    idle("maxent_clip_range", float | None, None, _CLIP),
)
"""Only src/maxent-grpo.py uses them."""

GUIDE_KEYS: tuple[Key, ...] = (
    *MAXENT_KEYS,
    ruled("init_kl_coeff", float | None, None, "`train.kl_coef`, in the place of `beta`"),
    ruled("kl_target", float, 0.0, "`grpo.kl_target`, with `grpo.kl_control: adaptive`; 0: fixed"),
    ruled("kl_horizon", int, 10_000, "`grpo.kl_horizon`, in sequences; 0: fixed"),
    refused("kl_ctl_step_size", float | None, None, "the largest change is a fifth", 0.2),
    refused("clip_range", float | None, None, "write `epsilon`", 0.2),
    # Prompts
    ruled("system_prompt", str | None, None, "`env_server.system_prompt`"),
    ruled(
        "chat_template",
        str | None,
        None,
        "the template, or a file with it; `env_server.tokenizer` is a copy that has it",
    ),
    ruled(
        "max_prompt_length",
        int | None,
        None,
        "`grpo.seq_len`, with `max_completion_length`. Longer prompts are skipped, not cut",
    ),
    # After the run
    ruled(
        "benchmarks",
        list[str],
        (),
        "evaluated after the run: tasks of env-server, or TASK=DATA, for example math or gsm8k=DIR",
    ),
    refused("callbacks", list[str], (), "there are no callbacks"),
    ruled("push_to_hub_revision", bool, False, "as `push_to_hub`"),
    ruled("hub_model_revision", str | None, None, "branch of `push_to_hub`; it is created"),
    ruled(
        "overwrite_hub_revision",
        bool,
        False,
        "false: a branch besides main that exists already is an error, at the start",
    ),
    # Weights & Biases
    ruled("wandb_entity", str | None, None, "$WANDB_ENTITY"),
    used("wandb_project", str | None, None, "logging.wandb.project"),
    used("wandb_run_group", str | None, None, "grpo.wandb_group"),
    idle("wandb_log_unique_prompts", bool, True, "rollouts/ has every prompt"),
    # Older TRL and transformers
    ruled(
        "overwrite_output_dir",
        bool,
        False,
        "true: an earlier run in `output_dir` is moved aside; false: it goes on",
    ),
    ruled("warmup_ratio", float, 0.0, "`grpo.warmup_ratio`"),
    idle("logging_dir", str | None, None, "`report_to: tensorboard` writes below `output_dir`"),
    idle("vllm_max_completion_rounds", int, 0, _ROUNDS),
    idle("vllm_retry_sleep", float, 0.5, _ROUNDS),
    idle("vllm_backfill_with_model", bool, True, _ROUNDS),
    idle("vllm_return_logprobs", bool, True, _ROUNDS),
    refused("vllm_best_of", int | None, None, "each completion is sampled once", 1),
    refused("vllm_frequency_penalty", float, 0.0, "write `repetition_penalty`"),
    refused("vllm_presence_penalty", float, 0.0, "write `repetition_penalty`"),
    # Ours
    used("sync_mode", str, "auto", "sync.mode", "`sync.mode`, how new weights reach the server"),
    used("eval_items", int, 16, "eval.num_ids"),
    ruled("grpo", dict[str, Any], {}, "any option of the command grpo, in snake_case"),
    ruled("env_server", dict[str, Any], {}, "any option of the command env-server, in snake_case"),
)

_GUIDE = {key.name: key for key in GUIDE_KEYS}
_EQUAL = {
    "torch_dtype": "dtype",
    "evaluation_strategy": "eval_strategy",
    "gen_temperature": "temperature",
    "gen_top_p": "top_p",
    "gen_top_k": "top_k",
    "vllm_top_k": "top_k",
    "gen_best_of": "vllm_best_of",
    "vllm_url": "vllm_server_base_url",
    "vllm_request_timeout": "vllm_server_timeout",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
    "init_kl_coef": "init_kl_coeff",
    "maxent_target_weight_entropy": "maxent_target_entropy",
    "wandb_group": "wandb_run_group",
    "wandb_run_name": "run_name",
}

ALIAS_KEYS: tuple[Key, ...] = tuple(
    alias(name, (_OF_TRL | _GUIDE)[of]) for name, of in _EQUAL.items()
)
