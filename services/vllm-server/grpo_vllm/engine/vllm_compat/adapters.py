"""Reports which modules a loaded adapter changes. vLLM leaves out modules that it does not find."""

from __future__ import annotations

from typing import Any


class AdapterModules:
    """A method that vLLM adds to its worker: `--worker-extension-cls`"""

    model_runner: Any

    def adapter_modules(self, number: int) -> dict[str, list[str]] | None:
        """`held`: the modules that have tensors in the adapter; `computed`: the modules that this
        worker computes with adapters. In vLLM's names. None: the adapter is not loaded."""
        manager = self.model_runner.lora_manager._adapter_manager
        found = manager.get_adapter(number)
        return found and {"held": [*found.loras], "computed": [*manager.modules]}
