"""Keys of TRL's ModelConfig."""

from __future__ import annotations

from grpo_offline.recipe.key import Key, idle, refused, ruled

_QUANTIZED = "weights are not quantised"
_PLAIN = "an adapter is a plain LoRA"

MODEL_KEYS: tuple[Key, ...] = (
    ruled(
        "model_name_or_path",
        str | None,
        None,
        "`model.train_id`; a variable VLLM_MODEL of training.sh wins",
    ),
    refused("model_revision", str, "main", "download the revision, and name its directory"),
    ruled("dtype", str | None, "auto", "`model.dtype`. Default here: the server's, not float32"),
    idle("attn_implementation", str | None, None, "the trainer uses PyTorch's attention"),
    ruled("use_peft", bool, False, "`sync.mode`: lora_only, unless `sync_mode` names another"),
    ruled("lora_r", int, 16, "`grpo.lora_r`"),
    ruled("lora_alpha", int, 32, "`grpo.lora_alpha`"),
    ruled("lora_dropout", float, 0.05, "`grpo.lora_dropout`"),
    ruled(
        "lora_target_modules",
        list[str] | None,
        None,
        "`grpo.lora_target_modules`; all-linear: all linear layers but the head",
    ),
    refused("lora_target_parameters", list[str] | None, None, _PLAIN),
    refused("lora_modules_to_save", list[str] | None, None, _PLAIN),
    refused("lora_task_type", str, "CAUSAL_LM", _PLAIN),
    refused("use_rslora", bool, False, _PLAIN),
    refused("use_dora", bool, False, _PLAIN),
    refused("load_in_8bit", bool, False, _QUANTIZED),
    refused("load_in_4bit", bool, False, _QUANTIZED),
    idle("bnb_4bit_quant_type", str, "nf4", _QUANTIZED),
    idle("use_bnb_nested_quant", bool, False, _QUANTIZED),
    idle("bnb_4bit_quant_storage", str | None, None, _QUANTIZED),
)
