"""Servers that pretend to serve the trainer's weights and do not: what its checks must catch.

Loaded as a vLLM plugin in place of the real one (VLLM_PLUGINS), by tests only.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from torch import nn

VARIABLE = "GRPO_NEGATIVE_CONTROL"


def control_plugin(control: str, directory: Path) -> dict[str, str]:
    """Environment that makes vLLM load the control instead of our plugin."""
    metadata = directory / "grpo_negative_controls-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: grpo-negative-controls\nVersion: 0\n"
    )
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ngrpo_negative_controls = grpo_negative_controls:register\n"
    )
    found_in = (str(directory), str(Path(__file__).parent), os.environ.get("PYTHONPATH"))
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, found_in)),
        "VLLM_PLUGINS": "grpo_negative_controls",
        VARIABLE: control,
    }


def register() -> None:
    from grpo_vllm.engine.vllm_compat.launch import offer_small_blocks, offer_staged_update

    offer_small_blocks()
    offer_staged_update()
    control = os.environ[VARIABLE]
    if control == "kept_kv":
        reuse_adapter_names()
    else:
        register_layers(control)


def reuse_adapter_names() -> None:
    """Every version of the adapter under one name and one path: vLLM takes the keys and values that
    it has cached for those of the newest."""
    from vllm.lora.request import LoRARequest

    from grpo_vllm.weights import lora

    link = Path(tempfile.mkdtemp(prefix="grpo-")) / "policy"

    def under_one_name(_name: str, number: int, path: str) -> LoRARequest:
        link.unlink(missing_ok=True)
        link.symlink_to(path)
        return LoRARequest("policy", number, str(link))

    lora.LoRARequest = under_one_name


def register_layers(control: str) -> None:
    from vllm.model_executor.model_loader import register_model_loader

    from grpo_vllm.engine.vllm_compat.layers import LOAD_FORMAT, PlainLinearMethod
    from grpo_vllm.weights.loader import SharedModelLoader

    class StockLayers(SharedModelLoader):
        """vLLM's CPU layout everywhere: linear layers serve from packed copies."""

        def prepare_layers(self, model: nn.Module) -> None:
            pass

    class PackedLmHead(SharedModelLoader):
        """Plain linear layers; only lm_head serves from a packed copy."""

        def check_shareable(self, model: nn.Module) -> None:
            pass

        def prepare_layers(self, model: nn.Module) -> None:
            from vllm.model_executor.layers.linear import UnquantizedLinearMethod

            for module in model.modules():
                if type(getattr(module, "quant_method", None)) is UnquantizedLinearMethod:
                    module.quant_method = PlainLinearMethod()

    class PrivateCopy(SharedModelLoader):
        """One fused tensor is served from a copy that the trainer does not write."""

        def check_shareable(self, model: nn.Module) -> None:
            super().check_shareable(model)
            fused = model.get_parameter("model.layers.0.self_attn.qkv_proj.weight")
            fused.data = fused.data.clone()

    register_model_loader(LOAD_FORMAT)(
        {
            "stock": StockLayers,
            "packed_lm_head": PackedLmHead,
            "private_copy": PrivateCopy,
        }[control]
    )
