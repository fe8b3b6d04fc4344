"""The parts of vLLM that we use exist in the installed version, and behave as we rely on.

Runs against any version, with a GPU or without; starts no engine.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from grpo_vllm.engine_plan import PlannedWeights
from grpo_vllm.settings import load_server_settings
from grpo_vllm.shareable_layout import LayoutFacts
from tests.inference.vllm_hooks import HOOKS, Hook, module_and_path


@pytest.fixture(scope="module")
def internals() -> ModuleType:
    """Importing vLLM warns about its own dependencies; that is not ours to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from grpo_vllm import engine_internals, loader, plain_layers

        assert loader
        assert plain_layers
    return engine_internals


@pytest.fixture
def environment() -> Iterator[None]:
    """vLLM sets variables when it makes a configuration."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.places[0])
def test_it_is_there(internals: ModuleType, hook: Hook) -> None:
    from vllm.version import __version_tuple__ as installed

    if installed[:2] < hook.since:
        pytest.skip(f"only from vLLM {hook.since[0]}.{hook.since[1]} on")
    if hook.device == "cuda" and not internals.current_platform.is_cuda():
        pytest.skip("no GPU: vLLM is built for another platform here")
    if hook.device == "cpu" and not internals.current_platform.is_cpu():
        pytest.skip("only on CPU: vLLM is built for another platform here")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        problem = hook.problem()
    assert problem is None, f"vLLM {'.'.join(map(str, installed[:3]))}: {problem}"


def test_the_table_has_everything_that_is_imported(internals: ModuleType) -> None:
    known = set()
    for hook in HOOKS:
        for module, path in map(module_and_path, hook.places):
            known |= {module, f"{module}.{path}", f"{module}.{path.split('.')[0]}"}
    imported = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(inspect.getsource(internals)))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm")
        for alias in node.names
    }
    assert imported - known == set()


SAMPLING_PARAMETERS = """
allowed_token_ids bad_words detokenize extra_args flat_logprobs frequency_penalty ignore_eos
include_stop_str_in_output logit_bias logprob_token_ids logprobs max_tokens min_p min_tokens n
output_kind output_text_buffer_length presence_penalty prompt_logprob_start
prompt_logprob_token_ids prompt_logprobs repetition_detection repetition_penalty
routed_experts_prompt_start seed skip_clone skip_reading_prefix_cache skip_special_tokens
spaces_between_special_tokens stop stop_token_ids stream_interval structured_outputs temperature
thinking_token_budget top_k top_p trace_decode_token_ids watermarking
"""


def test_vllm_has_no_sampling_parameter_that_nobody_has_looked_at(internals: ModuleType) -> None:
    """`POST /generate` passes on every parameter that it does not refuse. Before a new one is added
    here: does it change the logged probabilities, or harm other requests?"""
    names = {name for name in internals.SamplingParams.__struct_fields__ if name[0] != "_"}
    assert names <= set(SAMPLING_PARAMETERS.split())


def test_names_of_the_worker_extension_are_free(internals: ModuleType) -> None:
    """vLLM refuses an extension that shadows an attribute of its worker."""
    assert internals
    from vllm.v1.worker.gpu_worker import Worker

    from grpo_vllm.worker_extension import WeightExport

    ours = [name for name in vars(WeightExport) if not name.startswith("__")]
    assert [name for name in ours if hasattr(Worker, name)] == []


@pytest.mark.parametrize(
    ("module", "method"),
    [
        ("linear", "UnquantizedLinearMethod"),
        ("vocab_parallel_embedding", "UnquantizedEmbeddingMethod"),
    ],
)
def test_on_cuda_layers_keep_the_weights_that_were_loaded(
    internals: ModuleType, monkeypatch: pytest.MonkeyPatch, module: str, method: str
) -> None:
    """No packing, no second copy: a trainer that writes them has written what is served."""
    assert internals
    layers = import_module(f"vllm.model_executor.layers.{module}")
    elsewhere = SimpleNamespace(is_cpu=lambda: False, is_xpu=lambda: False)
    monkeypatch.setattr(layers, "current_platform", elsewhere)
    layer = torch.nn.Linear(2, 2)
    attributes, places = set(vars(layer)), places_of(layer)
    unquantized = getattr(layers, method)
    unquantized.__new__(unquantized).process_weights_after_loading(layer)
    assert places_of(layer) == places
    assert set(vars(layer)) == attributes


def places_of(layer: nn.Module) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}


def test_no_compiled_graph_has_weights_as_constants(internals: ModuleType) -> None:
    """Frozen, they would be served as they were when the graph was made."""
    assert internals
    import vllm

    freezes = re.compile(r"\bfreezing\b[\"']?\]?\s*[=:]\s*True")
    root = Path(vllm.__file__).parent
    folders = ("compilation", "config", "platforms", "v1/worker")
    sources = [path for folder in folders for path in (root / folder).rglob("*.py")]
    assert {path.name for path in sources if freezes.search(path.read_text())} <= {
        "cpu_model_runner.py"  # with max_autotune alone, which vLLM leaves off
    }
    assert torch._inductor.config.freezing is False


def test_the_admission_comes_beside_the_users_logits_processors(internals: ModuleType) -> None:
    from grpo_vllm.admission import PROCESSOR, Admission

    assert f"{Admission.__module__}:{Admission.__name__}" == PROCESSOR
    arguments = internals.parse_engine_arguments(["--model", "m", "--logits-processors", "a:B"])
    internals.check_requests_with(PROCESSOR, arguments)
    assert arguments.logits_processors == ["a:B", PROCESSOR]


@pytest.mark.usefixtures("environment")
def test_obstacles_to_sharing_are_read_off_vllms_configuration(
    internals: ModuleType, tiny_model: Path
) -> None:
    """Fields are set as vLLM would: not every one can be asked for on every platform."""
    config = engine_config(internals, tiny_model)
    plain = LayoutFacts(parallel_sizes=dict.fromkeys(internals.PARALLEL_SIZES, 1))
    assert internals.layout_facts(config) == plain
    config.parallel_config.tensor_parallel_size = 2
    config.parallel_config.enable_expert_parallel = True
    config.model_config.quantization = "fp8"
    config.model_config.enable_sleep_mode = True
    config.model_config.enable_cumem_allocator = True
    config.offload_config.uva.cpu_offload_gb = 2.0
    config.offload_config.prefetch.offload_group_size = 4
    config.speculative_config = SimpleNamespace(method="eagle3")
    facts = internals.layout_facts(config)
    assert facts == LayoutFacts(
        quantization="fp8",
        parallel_sizes={**dict.fromkeys(internals.PARALLEL_SIZES, 1), "tensor_parallel_size": 2},
        expert_parallel=True,
        sleep_mode=True,
        cumem_allocator=True,
        uva_offload_gb=2.0,
        prefetch_offload_groups=4,
        draft="eagle3",
    )
    config.speculative_config.method = "ngram"
    assert internals.layout_facts(config).draft is None


def engine_config(internals: ModuleType, model: Path) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = internals.parse_engine_arguments(["--model", str(model)])
        return AsyncEngineArgs.from_cli_args(arguments).create_engine_config()


def test_layers_that_are_not_plain_are_named(internals: ModuleType) -> None:
    """Experts are found by what serves them, whatever the model calls itself."""
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    def bare(kind: type) -> Any:
        made = kind.__new__(kind)
        if isinstance(made, nn.Module):
            nn.Module.__init__(made)
        return made

    def served_by(method: type) -> nn.Module:
        layer = nn.Module()
        layer.quant_method = bare(method)
        return layer

    model = nn.ModuleDict(
        {
            "q": served_by(internals.UnquantizedLinearMethod),
            "embed": served_by(internals.UnquantizedEmbeddingMethod),
            "attn": served_by(BaseKVCacheMethod),
            "experts": served_by(UnquantizedFusedMoEMethod),
            "latent": bare(MLAAttention),
            "norm": nn.LayerNorm(2),
        }
    )
    assert internals._special_layers(model) == {
        "experts": "UnquantizedFusedMoEMethod",
        "latent": "MLAAttention",
    }


PDL = "VLLM_LORA_DISABLE_PDL"


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("capability", "given", "switched", "value"),
    [
        ((10, 3), None, True, "1"),  # B300
        ((9, 0), None, False, None),  # H100
        ((12, 0), None, False, None),
        ((10, 0), "0", False, "0"),
        (None, None, False, None),
    ],
)
def test_lora_kernels_go_without_pdl_on_sm100(
    internals: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int] | None,
    given: str | None,
    switched: bool,
    value: str | None,
) -> None:
    from vllm.platforms.interface import DeviceCapability

    gpu = SimpleNamespace(
        is_cuda=lambda: True,
        get_device_capability=lambda: DeviceCapability(*capability) if capability else None,
    )
    monkeypatch.setattr(internals, "current_platform", gpu)
    os.environ.pop(PDL, None)
    os.environ.update({PDL: given} if given is not None else {})
    assert internals.switch_lora_pdl_off() is switched
    assert os.environ.get(PDL) == value


@pytest.mark.usefixtures("internals")
def test_loras_kernels_heed_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.lora.ops.triton_ops import utils

    gpu = SimpleNamespace(is_cuda=lambda: True, has_device_capability=lambda _: True)
    monkeypatch.setattr(utils, "current_platform", gpu)
    monkeypatch.delenv(PDL, raising=False)
    assert inspect.unwrap(utils.supports_pdl)() is True
    monkeypatch.setenv(PDL, "1")
    assert inspect.unwrap(utils.supports_pdl)() is False


@pytest.mark.usefixtures("environment", "internals")
@pytest.mark.parametrize("flags", [[], ["--enable-lora"]])
def test_the_switch_is_thrown_only_for_adapters(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, flags: list[str]
) -> None:
    from grpo_vllm import engine_arguments

    thrown: list[bool] = []
    monkeypatch.setattr(
        engine_arguments, "switch_lora_pdl_off", lambda: thrown.append(True) or True
    )
    settings = load_server_settings(["--model", str(tiny_model), *flags])
    engine_arguments.parsed_engine_arguments(settings, PlannedWeights())
    assert thrown == [True] * len(flags)


@pytest.mark.usefixtures("internals")
def test_adapters_in_float32_are_refused_by_name() -> None:
    """On a GPU vLLM's LoRA kernels assert a 16-bit type in the middle of a request."""
    from grpo_vllm.engine_arguments import refuse_float32_adapters

    for dtype in ("float32", "float"):
        with pytest.raises(SystemExit, match="pass --dtype bfloat16"):
            refuse_float32_adapters(dtype)
    refuse_float32_adapters("bfloat16")
