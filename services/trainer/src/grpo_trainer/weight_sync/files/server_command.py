"""The command line of the inference server that a mode needs."""

from __future__ import annotations

import shlex

from grpo_trainer.config.sync import served_weights_directory
from grpo_trainer.config.trainer import TrainerSettings
from grpo_trainer.model.adapter import served_rank

MAX_MODEL_LEN = 4096
"""Where nothing else is said, and the model allows as much."""


def server_flags(settings: TrainerSettings, port: int) -> list[str]:
    """Options of `vllm-api-server`. Redis is named by REDIS_URL: a command line is for all to
    read, and its URL may hold a password."""
    flags = ["--model", settings.model_name, "--port", str(port), "--dtype", settings.dtype]
    if not settings.sync.hands_off:
        return [*flags, "--share-weights"]
    flags += ["--run-id", settings.run_id]
    flags += ["--weights-dir", str(served_weights_directory(settings.save_path))]
    if settings.lora is not None:
        flags += ["--enable-lora", "--max-lora-rank", str(served_rank(settings.lora.r))]
    return flags


def sizing_flags(settings: TrainerSettings, more: str, has_gpu: bool) -> list[str]:
    """Of a server that grpo starts. Args: more: --vllm-flags."""
    flags = ["--max-model-len", str(settings.max_model_len or _longest(settings.model_name))]
    if has_gpu or "gpu_memory_utilization" in settings.model_fields_set:
        flags += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
    return flags + shlex.split(more)


def command_to_start(settings: TrainerSettings, port: int) -> str:
    """To copy and paste."""
    redis = 'REDIS_URL="<that of the trainer>" ' if settings.sync.hands_off else ""
    return redis + shlex.join(["vllm-api-server", *server_flags(settings, port)])


def _longest(model_name: str) -> int:
    from transformers import AutoConfig

    limit = getattr(AutoConfig.from_pretrained(model_name), "max_position_embeddings", None)
    return min(MAX_MODEL_LEN, limit or MAX_MODEL_LEN)
