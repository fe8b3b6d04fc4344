"""The four ways of new weights to the server, as far as they decide which options count."""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    """`--weight-bridge-mode`"""

    SHARED_VLLM = "shared_vllm"
    """Trainer and server hold one copy of the weights."""
    LORA_ONLY = "lora_only"
    """A LoRA adapter is trained; the running server loads each new one."""
    LORA_RESTART = "lora_restart"
    """A LoRA adapter is trained; the engine is restarted with it."""
    NONE = "none"
    """The whole model is trained; the engine is restarted on its checkpoint."""

    @property
    def trains_adapter(self) -> bool:
        return self in (Mode.LORA_ONLY, Mode.LORA_RESTART)

    @property
    def hands_off(self) -> bool:
        """Weights go to the server as files, by way of its supervisor."""
        return self is not Mode.SHARED_VLLM

    @property
    def restarts(self) -> bool:
        return self in (Mode.LORA_RESTART, Mode.NONE)


_LORA = frozenset({Mode.LORA_ONLY, Mode.LORA_RESTART})
_RESTART = frozenset({Mode.LORA_RESTART, Mode.NONE})
_HAND_OFF = _LORA | _RESTART
_SHARED = frozenset({Mode.SHARED_VLLM})

USED_IN: dict[str, frozenset[Mode]] = {
    "lora_r": _LORA,
    "lora_alpha": _LORA,
    "lora_dropout": _LORA,
    "lora_target_modules": _LORA,
    "lora_layer_indices": _LORA,
    "adapter_sync_interval": frozenset({Mode.LORA_ONLY}),
    "vllm_restart_interval": _HAND_OFF,
    "publish_deadline_s": _HAND_OFF,
    "vllm_flags": _RESTART,
    "pause_lease_s": _SHARED,
    "vllm_control_url": _SHARED,
    "weights_socket": _SHARED,
    "vllm_config_path": _SHARED,
    "verify_every_steps": _SHARED,
}
"""Options that not every mode reads. Given in another one they are a mistake."""

STARTS_SERVER_WITH = ("vllm_gpu", "gpu_memory_utilization", "max_model_len")
"""Read where `grpo` starts the server. Command lines of the archived trainer name them in every
mode, so in the others they are mentioned and left alone."""


def unused_options(mode: Mode, given: set[str]) -> list[str]:
    """Fields that were given and that `mode` does not read. Args: given: names of fields."""
    return [name for name, modes in USED_IN.items() if name in given and mode not in modes]
