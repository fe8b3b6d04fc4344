"""Keys of TRL's GRPOConfig itself."""

from __future__ import annotations

from typing import Any

from grpo_offline.recipe.key import Key, idle, refused, ruled, used

_ADAPTIVE = "has an effect only with `use_adaptive_entropy`"
_CONTINUOUS = "the server batches continuously; without `use_vllm`, batches are padded"
_LOSS = "no such loss; `loss_type` lists those there are"
_SYNCED = "has an effect only with `sync_ref_model`"
_TRAINING_SH = "; a variable {} of training.sh wins"

GRPO_KEYS: tuple[Key, ...] = (
    refused("model_init_kwargs", dict[str, Any] | str | None, None, "`dtype` is the only one", {}),
    refused("trust_remote_code", bool, False, "code of a model's repository is not run"),
    refused("router_aux_loss_coef", float | None, None, "experts get no loss of their own", 0.0),
    refused("disable_dropout", bool, False, "dropout is that of the model's configuration"),
    idle("cast_lm_head_to_fp32", bool, False, "logprobs are computed in float32"),
    # Sampling
    used("num_generations", int | None, 8, "data.rollouts_per_problem"),
    used(
        "num_generations_eval",
        int | None,
        None,
        "eval.replicates",
        "`eval.replicates`; default: `num_generations`",
    ),
    used("max_completion_length", int | None, 512, "generation.max_new_tokens"),
    used("temperature", float, 1.0, "generation.temperature"),
    used("top_p", float, 1.0, "generation.top_p"),
    used("top_k", int, 0, "generation.top_k"),
    used("repetition_penalty", float, 1.0, "generation.repetition_penalty"),
    refused("min_p", float | None, None, "write `top_p` or `top_k`", 0.0),
    refused("generation_kwargs", dict[str, Any] | str | None, None, "each option has its key", {}),
    ruled(
        "chat_template_kwargs",
        dict[str, Any] | str | None,
        None,
        "`env_server.template_args`, for example `{enable_thinking: false}`",
    ),
    idle("cache_implementation", str | None, None, "the server manages its cache"),
    ruled(
        "generation_batch_size",
        int | None,
        None,
        "`data.problems_per_iteration`, times `num_generations`",
    ),
    ruled(
        "steps_per_generation",
        int | None,
        None,
        "`data.problems_per_iteration`: completions of that number of micro-batches; default: "
        "`gradient_accumulation_steps`",
    ),
    refused("num_iterations", int, 1, "each completion is trained on once"),
    refused("shuffle_dataset", bool | None, True, "rows are shuffled in each pass"),
    idle("pad_to_multiple_of", int | str | None, "auto", "sequences are packed, not padded"),
    idle("ds3_gather_for_generation", bool, True, "DeepSpeed is not supported"),
    refused("max_tool_calling_iterations", int | None, None, "`data.task` of your own has tools"),
    refused("use_transformers_continuous_batching", bool, False, _CONTINUOUS),
    refused("use_transformers_paged", bool, False, _CONTINUOUS),
    refused(
        "transformers_continuous_batching_config", dict[str, Any] | str | None, None, _CONTINUOUS
    ),
    # vLLM
    ruled("use_vllm", bool, False, "`generation.backend`: vllm_server; otherwise local"),
    idle("vllm_mode", str, "colocate", "vllm-api-server is a process of its own, on any GPU"),
    refused("vllm_model_impl", str, "vllm", "vllm-api-server serves vLLM's own models"),
    idle("vllm_enable_sleep_mode", bool, False, "vllm-api-server never sleeps"),
    refused("vllm_structured_outputs_regex", str | None, None, "completions are not constrained"),
    ruled("vllm_server_base_url", str | None, None, "`generation.base_url`"),
    ruled("vllm_server_host", str, "0.0.0.0", "`generation.base_url`; 0.0.0.0: this host"),
    ruled("vllm_server_port", int, 8000, "`generation.base_url`; a variable VLLM_PORT wins"),
    used("vllm_server_timeout", float, 240.0, "env_server.start_deadline_s"),
    idle("vllm_group_port", int, 51216, "weights do not travel by NCCL"),
    ruled(
        "vllm_gpu_memory_utilization",
        float,
        0.3,
        "the server's, if training.sh starts it" + _TRAINING_SH.format("VLLM_MEM_UTIL"),
    ),
    ruled(
        "vllm_max_model_length",
        int | None,
        None,
        "the server's, if training.sh starts it" + _TRAINING_SH.format("VLLM_MAX_LEN"),
    ),
    ruled(
        "vllm_tensor_parallel_size",
        int,
        1,
        "the server's, if training.sh starts it" + _TRAINING_SH.format("VLLM_TP_SIZE"),
    ),
    # Objective
    ruled("beta", float, 0.0, "`train.kl_coef`"),
    ruled("epsilon", float, 0.2, "`grpo.clip_eps`; of loss_type cispo: none"),
    ruled(
        "epsilon_high",
        float | None,
        None,
        "`grpo.clip_eps_high`; of loss_type cispo the highest ratio itself, 5 by default (TRL: "
        "epsilon)",
    ),
    refused("delta", float | None, None, "importance ratios have no second bound"),
    ruled(
        "loss_type",
        str,
        "dapo",
        "`grpo.aggregation`: grpo: sequence; dapo, bnpo: token; dr_grpo: constant. "
        "cispo: `grpo.objective`",
    ),
    *(
        refused(f"sapo_temperature_{side}", float, value, _LOSS)
        for side, value in (("neg", 1.05), ("pos", 1.0))
    ),
    *(
        refused(f"vespo_{part}_{side}", float, value, _LOSS)
        for part, side, value in (
            ("k", "pos", 2.0),
            ("lambda", "pos", 3.0),
            ("k", "neg", 3.0),
            ("lambda", "neg", 2.0),
        )
    ),
    ruled("importance_sampling_level", str, "token", "`grpo.importance_level`"),
    ruled("reward_weights", list[float] | None, None, "`env_server.reward_weights`, by name"),
    refused("multi_objective_aggregation", str, "sum_then_normalize", "rewards are summed first"),
    ruled(
        "scale_rewards",
        str | bool,
        "group",
        "`grpo.advantage`: group or true: group_std; none or false: group_mean",
    ),
    used("mask_truncated_completions", bool, False, "env_server.mask_too_long_completions"),
    refused("sync_ref_model", bool, False, "the reference model stays the model before training"),
    idle("ref_model_mixup_alpha", float, 0.6, _SYNCED),
    idle("ref_model_sync_steps", int, 512, _SYNCED),
    refused("top_entropy_quantile", float, 1.0, "every token of a completion is trained on"),
    used("entropy_coef", float, 0.0, "train.entropy_coef"),
    refused("use_adaptive_entropy", bool, False, "`entropy_coef` is fixed"),
    idle("entropy_coef_min", float, 0.0, _ADAPTIVE),
    idle("entropy_coef_max", float, 1.0, _ADAPTIVE),
    idle("entropy_coef_delta", float, 0.005, _ADAPTIVE),
    idle("entropy_target", float, 0.2, _ADAPTIVE),
    ruled("vllm_importance_sampling_correction", bool, True, "`grpo.importance_correction`"),
    ruled(
        "vllm_importance_sampling_mode",
        str,
        "sequence_mask",
        "`grpo.importance_correction` and its level: token or sequence, mask or truncate",
    ),
    ruled(
        "vllm_importance_sampling_clip_max", float | None, 3.0, "`grpo.importance_correction_cap`"
    ),
    refused("vllm_importance_sampling_clip_min", float | None, None, "ratios have one bound"),
    refused("off_policy_mask_threshold", float | None, None, "see `vllm_importance_sampling_mode`"),
    ruled(
        "use_bias_correction_kl",
        bool,
        True,
        "`grpo.kl_estimator`: k2, whose gradient on tokens "
        "of the policy is that of the reverse KL divergence; false: k3",
    ),
    # Completions in logs
    idle("log_completions", bool, False, "rollouts/ has every completion; see grpo-rollouts"),
    idle("log_multimodal", bool, True, "completions are text"),
    idle("num_completions_to_print", int | None, None, "rollouts/ has every completion"),
    idle("log_unique_prompts", bool, False, "rollouts/ has every prompt"),
    refused("log_completions_hub_repo", str | None, None, "completions stay on this host"),
)
