"""Servers that pretend to share their weights and do not: what the alignment check must catch.

Loaded as a vLLM plugin in place of the real one (VLLM_PLUGINS), by tests only.
"""

from __future__ import annotations

import os

from torch import nn

VARIABLE = "GRPO_NEGATIVE_CONTROL"


def register() -> None:
    from vllm.model_executor.model_loader import register_model_loader

    from grpo_vllm.loader import SharedModelLoader
    from grpo_vllm.plain_layers import PlainLinearMethod
    from grpo_vllm.plugin_names import LOAD_FORMAT

    class StockLayers(SharedModelLoader):
        """vLLM's CPU layout everywhere: linear layers serve from packed copies."""

        def prepare_layers(self, model: nn.Module) -> None:
            pass

    class UncheckedStockLayers(StockLayers):
        def check_shareable(self, model: nn.Module) -> None:
            pass

    class PackedLmHead(UncheckedStockLayers):
        """Plain linear layers; only lm_head serves from a packed copy."""

        def prepare_layers(self, model: nn.Module) -> None:
            from vllm.model_executor.layers.linear import UnquantizedLinearMethod

            for module in model.modules():
                if type(getattr(module, "quant_method", None)) is UnquantizedLinearMethod:
                    module.quant_method = PlainLinearMethod()

    register_model_loader(LOAD_FORMAT)(
        {
            "stock": StockLayers,
            "stock_unchecked": UncheckedStockLayers,
            "packed_lm_head": PackedLmHead,
        }[os.environ[VARIABLE]]
    )
