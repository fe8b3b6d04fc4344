"""Everything of vLLM that this package touches, in one place.

vLLM moves between minor versions; when one breaks us, the repair belongs here. Touched:

1. model loading: `register_model_loader`, `DefaultModelLoader` (methods `load_weights`,
   `get_all_weights`, `load_model`), `LoadConfig`
2. layers: `UnquantizedLinearMethod`, `UnquantizedEmbeddingMethod`, the attributes `quant_method`
   and `cpu_linear`
3. platform: `current_platform.is_cpu()`
4. server: `make_arg_parser`, `validate_parsed_serve_args`, `build_async_engine_client`,
   `build_app`, `init_app_state`, `cli_env_setup`
5. engine: `AsyncLLM.generate`, `pause_generation`, `resume_generation`, `collective_rpc`,
   `errored`; the worker's `get_model`
6. requests: `SamplingParams`, `RequestOutputKind`, `TokensPrompt`

Written for 0.24 (CUDA, from its source) and 0.32 (CPU, tested). `tests/integration/
test_vllm_internals.py` checks that each is still there.
"""

from __future__ import annotations

from vllm.config.load import LoadConfig
from vllm.config.utils import replace as replace_config
from vllm.inputs import TokensPrompt
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams

__all__ = [
    "DefaultModelLoader",
    "LoadConfig",
    "RequestOutputKind",
    "SamplingParams",
    "TokensPrompt",
    "UnquantizedEmbeddingMethod",
    "UnquantizedLinearMethod",
    "current_platform",
    "register_model_loader",
    "replace_config",
]
