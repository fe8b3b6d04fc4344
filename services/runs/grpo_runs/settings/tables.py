"""Tables of the options of `grpo-run` and `grpo-demo`: their sections, names and defaults, and the
options that fit only some runs."""

from __future__ import annotations

from grpo_core.tree.sections import SERVER, names_of, sections_of
from grpo_core.tree.trainer_command import CommandLine

SETS_ITSELF = (
    *("redis_url", "run_id", "run_api_url", "save_path", "metrics_file", "rollouts_dir"),
    *("host", "port", "health_port", "control_host", "control_port", "log_dir"),
    *("wandb_name", "eval_output", "curriculum_dir", "untrained_dir"),
)
"""Options of a run whose services are all started here: each run has its own."""
OF_PAIR = frozenset({"log_dir", "stop_grace_s"})
"""Of a run without --task, of which server and trainer are started here."""
OWN_MEANING = frozenset({"stop_grace_s", "start_deadline_s", f"{SERVER}.max_staleness"})
"""Options of services that mean something else here."""
NEEDS_TASK = (
    *(
        "run_dir",
        "report",
        "watch",
        "kv_cache_mib",
        "eager",
        "compute_threads",
    ),
    *("step_deadline_s", "start_deadline_s", "on_alert", "watch"),
)
"""Own options that mean nothing without --task, as those of environments and run-api do."""
OF_ONE_SERVER = ("server_name", "advertise_url", "staging_dir")
API_KEYS = ("vllm_api_key", "api_key")

_OWN = {
    "model": ("model",),
    "task": ("task",),
    "weights": ("mode",),
    "queue": ("run_api_token",),
    "server": ("servers", "kv_cache_mib", "eager", "server_flags"),
    "run": (
        *(
            "run_dir",
            "resume",
            "report",
            "watch",
            "compute_threads",
            "step_deadline_s",
        ),
        *("server_deadline_s", "start_deadline_s", "stop_grace_s", "log_dir"),
        *("on_end", "on_alert", "watch"),
    ),
}
GROUPS = sections_of(_OWN)
OWN = frozenset({*(name for names in _OWN.values() for name in names), "server_options"})
"""Options that no service has, or that mean more here."""
ALSO_SHOWN = frozenset(
    {
        *("data", "group_size", "device", "seed", "log_level", "save_path", "run_api_url"),
        *("redis_url", "run_id", "host", "port", "health_port", "adapter_sync_interval"),
        *("lora_r", "lora_alpha", "lora_dropout", "reward_weights"),
    }
)
"""Options of services that most runs set."""
_OF_TRAINER = {
    name: alias for name, alias in CommandLine.command.aliases.items() if name != "vllm-url"
}
ALIASES = {
    **names_of(GROUPS, OWN_MEANING),
    **_OF_TRAINER,
    "vllm-port": "port",
    "command": "agent_command",
    "server.dtype": "dtype",  # an option of vLLM
}

DEFAULTS = {
    "steps": "250; gsm8k: 60; at most 60 with a pretrained model, and if the engine restarts; "
    "without --task: 10",
    "batch_size": "64; gsm8k: 16; pretrained models: at most 32; without --task: 2",
    "gradient_accumulation_steps": "2; without --task: 32",
    "lr": "3e-4; gsm8k: 1e-4; six times as high with an adapter; pretrained models: 1e-5, with an "
    "adapter 3e-4; without --task: 1e-5",
    "warmup_steps": "5; without --task: 0",
    "max_completion_tokens": "8; gsm8k: 32; with a pretrained model, gsm8k and reward functions on "
    "a CPU: 256; other tasks: their own limit",
    "seq_len": "128; gsm8k: 1152; your own task: 256, with a pretrained model 1152; without "
    "--task: 2048",
    "max_model_len": "512; gsm8k: 1536; at least --seq-len; without --task: the model's limit, at "
    "most 4096",
    "max_batches_offpolicy": "1",
    "gpu_memory_utilization": "0.4; without --task: 0.45",
    "dtype": "float32; on a GPU bfloat16; without --task: the model's",
    "vllm_restart_interval": "10; without --task: 3; 1 in mode none with --publish update",
    "lora_target_modules": "q_proj,v_proj; with the tiny model every linear layer",
    "eval_every": "before and after the run",
    "checkpoint_interval": "0; without --task: 3",
}
"""What applies if these are not given, for the user."""
OF_SERVICES = (
    frozenset(name for names in GROUPS.values() for name in names)
    - OWN
    - DEFAULTS.keys()
    - ALSO_SHOWN
)
"""Options that `--help` only names."""
