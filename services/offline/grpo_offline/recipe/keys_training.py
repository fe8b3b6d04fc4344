"""Keys that TRL's GRPOConfig inherits from transformers' TrainingArguments."""

from __future__ import annotations

from typing import Any

from grpo_offline.recipe.key import Key, idle, refused, ruled, used

_EVERY_STEP = "every optimizer step is logged"
_NO_LOADER = "rows are read once, at the start, and there is no data loader"
_ONE_RANK = "ranks exchange sums in the trainer's own way"
_SHARDING = "`fsdp` and the trainer's own ranks are the only way to distribute"
_TRACKIO = "Trackio is not supported; `report_to` takes wandb and tensorboard"
_WITH_BEST = "has an effect only with `load_best_model_at_end`"

TRAINING_KEYS: tuple[Key, ...] = (
    # Batches and length of the run
    ruled(
        "output_dir", str | None, None, "directory of the run; default: `runs/` and the run's name"
    ),
    used("per_device_train_batch_size", int, 8, "train.batch_size"),
    used("gradient_accumulation_steps", int, 1, "train.grad_accum_steps"),
    ruled(
        "num_train_epochs",
        float,
        3.0,
        "`train.iterations`: as many as that many passes through the rows take",
    ),
    ruled("max_steps", int, -1, "`train.iterations`; above 0, it replaces `num_train_epochs`"),
    used("seed", int, 42, "seed"),
    used("data_seed", int | None, None, "env_server.seed", "`env_server.seed`; default: `seed`"),
    # Optimizer
    used("learning_rate", float, 1e-6, "train.lr"),
    ruled(
        "lr_scheduler_type",
        str,
        "linear",
        "`grpo.lr_schedule`: linear, cosine, constant or constant_with_warmup",
    ),
    refused("lr_scheduler_kwargs", dict[str, Any] | None, None, "no schedule takes arguments", {}),
    ruled("warmup_steps", float, 0, "`grpo.warmup_steps`; below 1: `grpo.warmup_ratio`"),
    ruled(
        "optim",
        str,
        "adamw_torch_fused",
        "`grpo.optimizer`: adamw_torch and adamw_torch_fused: adamw; adamw_bnb_8bit and "
        "adamw_8bit: adamw_8bit; adafactor",
    ),
    refused("optim_args", str | None, None, "no optimizer takes further arguments"),
    refused(
        "optim_target_modules",
        str | list[str] | None,
        None,
        "write `grpo: {train_layer_indices: …}` to train a part of the model",
    ),
    used("weight_decay", float, 0.0, "grpo.weight_decay"),
    used("adam_beta1", float, 0.9, "grpo.adam_beta1"),
    used("adam_beta2", float, 0.999, "grpo.adam_beta2"),
    used("adam_epsilon", float, 1e-8, "grpo.adam_eps"),
    used("max_grad_norm", float, 1.0, "train.grad_clip"),
    # Forward pass
    ruled("bf16", bool | None, None, "`model.dtype`: bfloat16. The optimizer works in float32"),
    ruled("fp16", bool, False, "`model.dtype`: float16. The optimizer works in float32"),
    idle("bf16_full_eval", bool, False, "the server evaluates, in the data type it serves"),
    idle("fp16_full_eval", bool, False, "the server evaluates, in the data type it serves"),
    idle("tf32", bool | None, None, "PyTorch's default holds"),
    used("gradient_checkpointing", bool, True, "grpo.gradient_checkpointing"),
    idle(
        "gradient_checkpointing_kwargs",
        dict[str, Any] | None,
        None,
        "checkpoints are of the kind `use_reentrant: false`",
    ),
    used("torch_compile", bool, False, "grpo.compile"),
    refused("torch_compile_backend", str | None, None, "`torch_compile` uses inductor", "inductor"),
    refused("torch_compile_mode", str | None, None, "`torch_compile` has one mode", "default"),
    idle("use_liger_kernel", bool, False, "the trainer has its own fused head"),
    refused("liger_kernel_config", dict[str, bool] | None, None, "no kernel of liger is used"),
    idle("use_cache", bool, False, "training keeps no cache of keys and values"),
    refused("neftune_noise_alpha", float | None, None, "inputs get no noise", 0.0),
    refused("label_smoothing_factor", float, 0.0, "the loss has no labels"),
    idle("torch_empty_cache_steps", int | None, None, "memory is bounded by micro-batches"),
    refused(
        "auto_find_batch_size",
        bool,
        False,
        "a batch that does not fit ends the run; `grpo --memory-plan` prints what one needs",
    ),
    refused("full_determinism", bool, False, "completions of a server are not deterministic"),
    ruled("use_cpu", bool, False, "`model.device`: cpu"),
    # Logging
    idle("logging_strategy", str, "steps", _EVERY_STEP),
    idle("logging_steps", float, 10, _EVERY_STEP),
    idle("logging_first_step", bool, False, _EVERY_STEP),
    idle("log_on_each_node", bool, True, _ONE_RANK),
    idle("logging_nan_inf_filter", bool, True, "a loss that is not finite ends the run"),
    idle("include_num_input_tokens_seen", str | bool, "no", "metrics.jsonl has the tokens"),
    ruled("log_level", str, "passive", "`logging.level`; passive: WARNING"),
    idle("log_level_replica", str, "warning", _ONE_RANK),
    idle("disable_tqdm", bool | None, None, "a bar is drawn only on a terminal"),
    ruled(
        "report_to",
        list[str],
        ("none",),
        "`logging.wandb.enabled` (wandb), `grpo.tensorboard_dir` (tensorboard); or none",
    ),
    used("run_name", str | None, None, "logging.wandb.run_name"),
    idle("project", str, "huggingface", _TRACKIO),
    idle("trackio_space_id", str | None, None, _TRACKIO),
    idle("trackio_bucket_id", str | None, None, _TRACKIO),
    idle("trackio_static_space_id", str | bool | None, None, _TRACKIO),
    # Evaluation
    ruled("eval_strategy", str, "no", "`eval.enabled`: no or steps; epoch: `eval.interval`"),
    ruled(
        "eval_steps",
        float | None,
        None,
        "`eval.interval`, in optimizer steps; below 1: a share of the run. Default: 10 steps",
    ),
    refused("eval_delay", float, 0, "the first evaluation is before the first step"),
    used("per_device_eval_batch_size", int, 8, "eval.batch_size"),
    refused("prediction_loss_only", bool, False, "an evaluation scores completions"),
    idle("eval_on_start", bool, False, "with `eval_strategy: steps`, the untrained model is too"),
    idle("eval_do_concat_batches", bool, True, "an evaluation scores completions"),
    idle("eval_use_gather_object", bool, False, _ONE_RANK),
    idle("eval_accumulation_steps", int | None, None, "an evaluation holds no tensors"),
    idle("include_for_metrics", list[str], (), "an evaluation scores completions"),
    idle("batch_eval_metrics", bool, False, "an evaluation scores completions"),
    # Saving
    ruled("save_strategy", str, "steps", "`checkpoint.save_interval`: no, steps or epoch"),
    ruled("save_steps", float, 500, "`checkpoint.save_interval`, in optimizer steps"),
    ruled("save_total_limit", int | None, None, "`checkpoint.keep_last_k`; default: all"),
    idle("save_only_model", bool, False, "one state to resume from is kept beside the models"),
    idle("save_on_each_node", bool, False, _ONE_RANK),
    idle("enable_jit_checkpoint", bool, False, "an interrupted run repeats one iteration at most"),
    refused(
        "load_best_model_at_end",
        bool,
        False,
        "metrics/eval_iter_*.json name the best model; all models up to `save_total_limit` stay",
    ),
    idle("metric_for_best_model", str | None, None, _WITH_BEST),
    idle("greater_is_better", bool | None, None, _WITH_BEST),
    ruled(
        "resume_from_checkpoint",
        str | bool | None,
        None,
        "a directory: the run of this directory goes on. Otherwise the run of `output_dir` does, "
        "if it has one; false: that is an error",
    ),
    idle("ignore_data_skip", bool, False, "a resumed run goes on at its place in the data"),
    idle("restore_callback_states_from_checkpoint", bool, False, "there are no callbacks"),
    # Hub
    ruled("push_to_hub", bool, False, "the trained model is uploaded after the run"),
    ruled("hub_model_id", str | None, None, "repository of `push_to_hub`"),
    ruled("hub_token", str | None, None, "token of `push_to_hub`; default: $HF_TOKEN or the login"),
    ruled("hub_private_repo", bool | None, None, "whether a new repository is private"),
    ruled("hub_revision", str | None, None, "branch of `push_to_hub`; it is created"),
    idle("hub_strategy", str, "every_save", "the model is uploaded once, after the run"),
    idle("hub_always_push", bool, False, "the model is uploaded once, after the run"),
    # Data loader, ranks
    idle("dataloader_drop_last", bool, False, _NO_LOADER),
    idle("dataloader_num_workers", int, 0, _NO_LOADER),
    idle("dataloader_pin_memory", bool, True, _NO_LOADER),
    idle("dataloader_persistent_workers", bool, False, _NO_LOADER),
    idle("dataloader_prefetch_factor", int | None, None, _NO_LOADER),
    idle("dataloader_multiprocessing_context", str | None, None, _NO_LOADER),
    idle("dataloader_in_order", bool, True, _NO_LOADER),
    idle("remove_unused_columns", bool | None, False, "`columns` of a data set are kept"),
    idle("label_names", list[str] | None, None, "rewards take any column"),
    refused("train_sampling_strategy", str, "random", "rows are shuffled in each pass"),
    idle("length_column_name", str, "length", "rows are shuffled in each pass"),
    idle("average_tokens_across_devices", bool, True, _ONE_RANK),
    idle("ddp_find_unused_parameters", bool | None, None, _ONE_RANK),
    idle("ddp_bucket_cap_mb", int | None, None, _ONE_RANK),
    idle("ddp_broadcast_buffers", bool | None, None, _ONE_RANK),
    idle("ddp_static_graph", bool | None, None, _ONE_RANK),
    idle("ddp_backend", str | None, None, _ONE_RANK),
    idle("ddp_timeout", int, 1800, _ONE_RANK),
    idle("local_rank", int, -1, "accelerate sets it"),
    ruled("fsdp", str | bool | None, None, "`grpo.fsdp`: several ranks shard the weights"),
    refused("fsdp_config", dict[str, Any] | str | None, None, _SHARDING),
    refused("deepspeed", dict[str, Any] | str | None, None, _SHARDING),
    refused("accelerator_config", dict[str, Any] | str | None, None, _SHARDING),
    refused("parallelism_config", dict[str, Any] | None, None, _SHARDING),
    refused("debug", str | list[str], "", "no such mode"),
    idle("skip_memory_metrics", bool, True, "metrics.jsonl has the memory"),
    idle("do_train", bool, False, "the scripts always train"),
    idle("do_eval", bool, False, "`eval_strategy` decides"),
    refused("do_predict", bool, False, "write `env-server TASK evaluate` to predict only"),
)
