"""Everything that we touch of vLLM is still there, in the installed version, and does what it did.

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
from structlog.testing import capture_logs
from torch import nn

from grpo_vllm.engine_plan import PlannedWeights
from grpo_vllm.settings import load_server_settings
from grpo_vllm.shareable_layout import LayoutFacts, why_not_shareable
from tests.inference.vllm_hooks import HOOKS, Hook


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
def on_cpu(internals: ModuleType) -> None:
    if not internals.current_platform.is_cpu():
        pytest.skip("only on CPU: vLLM is built for another platform here")


@pytest.fixture
def environment() -> Iterator[None]:
    """vLLM sets variables when it makes a configuration."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: f"{hook.place} {hook.mentions}".strip())
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


def test_the_table_knows_everything_that_is_imported(internals: ModuleType) -> None:
    places = {place for hook in HOOKS for place in hook.places()}
    known = {place.partition(":")[0] for place in places}
    known |= {":".join([module, path.split(".")[0]]) for module, _, path in _parted(places)}
    imports = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(internals)))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm")
    ]
    names = [(node.module, alias.name) for node in imports for alias in node.names]
    unknown = [
        f"from {module} import {name}"
        for module, name in names
        if not {f"{module}:{name}", f"{module}.{name}"} & known
    ]
    assert unknown == []


def _parted(places: set[str]) -> list[tuple[str, str, str]]:
    return [place.partition(":") for place in places]


def test_names(internals: ModuleType) -> None:
    missing = [name for name in internals.__all__ if getattr(internals, name, None) is None]
    assert missing == []


def test_the_loader_overrides_methods_that_exist(internals: ModuleType) -> None:
    from grpo_vllm.loader import SharedModelLoader

    stock = internals.DefaultModelLoader
    overridden = {"load_weights", "get_all_weights", "load_model"}
    assert overridden <= set(vars(SharedModelLoader))
    assert all(callable(getattr(stock, method, None)) for method in overridden)


def test_names_of_the_worker_extension_are_free(internals: ModuleType) -> None:
    """vLLM refuses an extension that would take the place of something of its worker's."""
    assert internals
    from vllm.v1.worker.gpu_worker import Worker

    from grpo_vllm.worker_extension import WeightExport

    ours = [name for name in vars(WeightExport) if not name.startswith("__")]
    assert [name for name in ours if hasattr(Worker, name)] == []


def test_layers_still_serve_through_the_kernel_attribute(internals: ModuleType) -> None:
    """The plain layout hangs on one hook and one attribute."""
    from grpo_vllm.plain_layers import PlainEmbeddingMethod, PlainLinearMethod

    for plain in (PlainLinearMethod, PlainEmbeddingMethod):
        layer = torch.nn.Linear(2, 2)
        plain.__new__(plain).process_weights_after_loading(layer)
        assert layer.cpu_linear is torch.nn.functional.linear
    assert issubclass(PlainLinearMethod, internals.UnquantizedLinearMethod)


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


def test_every_request_is_shown_to_logits_processors(internals: ModuleType) -> None:
    """By this hook requests that end the engine are refused on vLLM's own routes."""
    from grpo_vllm.admission import PROCESSOR, Admission

    module, _, name = PROCESSOR.partition(":")
    assert (module, name) == (Admission.__module__, Admission.__name__)
    arguments = internals.parse_engine_arguments(["--model", "m", "--logits-processors", "a:B"])
    internals.check_requests_with(PROCESSOR, arguments)
    assert arguments.logits_processors == ["a:B", PROCESSOR]
    from vllm.v1.sample.logits_processor import validate_logits_processors_parameters

    validate_logits_processors_parameters([PROCESSOR], internals.SamplingParams())
    with pytest.raises(internals.EngineRefusal, match="logprob_token_ids: not served"):
        validate_logits_processors_parameters(
            [PROCESSOR], internals.SamplingParams(logprobs=1, logprob_token_ids=[1])
        )


@pytest.mark.usefixtures("on_cpu")
def test_seeds_are_refused_on_cpu(internals: ModuleType) -> None:
    from vllm.v1.sample.logits_processor import validate_logits_processors_parameters

    from grpo_vllm.admission import PROCESSOR

    with pytest.raises(internals.EngineRefusal, match="seed: not supported per request on CPU"):
        validate_logits_processors_parameters([PROCESSOR], internals.SamplingParams(seed=1))


def test_the_admission_leaves_logits_alone(internals: ModuleType) -> None:
    assert internals
    from grpo_vllm.admission import Admission

    admission = Admission(None, torch.device("cpu"), is_pin_memory=False)
    logits = torch.rand(2, 3)
    admission.update_state(None)
    assert admission.is_argmax_invariant()
    assert admission.apply(logits) is logits


def test_a_wrong_parameter_is_an_error_that_is_known(internals: ModuleType) -> None:
    with pytest.raises(internals.EngineRefusal):
        internals.SamplingParams(top_p=7)


@pytest.mark.usefixtures("on_cpu")
def test_there_is_no_sleep_on_cpu(internals: ModuleType) -> None:
    """vLLM's CPU worker would say "asleep" and do nothing."""
    assert "no sleep mode" in internals.why_no_sleep(None)


def test_the_server_is_built_from_vllms_own_parts(internals: ModuleType) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = internals._server()
    for name in ("build_app", "init_app_state"):
        assert callable(getattr(parts, name))


@pytest.mark.usefixtures("environment")
def test_a_dense_model_and_its_layout_are_read_off_vllms_configuration(
    internals: ModuleType, tiny_model: Path
) -> None:
    facts = internals.layout_facts(engine_config(internals, tiny_model))
    assert facts == LayoutFacts(parallel_sizes=dict.fromkeys(internals.PARALLEL_SIZES, 1))
    assert why_not_shareable(facts) == []


@pytest.mark.usefixtures("environment")
def test_what_stands_against_sharing_is_read_off_vllms_configuration(
    internals: ModuleType, tiny_model: Path
) -> None:
    """Fields are set as vLLM would: not every one can be asked for on every platform."""
    config = engine_config(internals, tiny_model)
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
        ((10, 0), None, True, "1"),  # B200
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


def test_the_switch_is_what_loras_kernels_ask(
    internals: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert internals
    from vllm.lora.ops.triton_ops import utils

    gpu = SimpleNamespace(is_cuda=lambda: True, has_device_capability=lambda _: True)
    monkeypatch.setattr(utils, "current_platform", gpu)
    monkeypatch.delenv(PDL, raising=False)
    assert inspect.unwrap(utils.supports_pdl)() is True
    monkeypatch.setenv(PDL, "1")
    assert inspect.unwrap(utils.supports_pdl)() is False


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("flags", [[], ["--enable-lora"]])
def test_the_switch_is_thrown_where_adapters_are_served(
    internals: ModuleType, monkeypatch: pytest.MonkeyPatch, tiny_model: Path, flags: list[str]
) -> None:
    assert internals
    from grpo_vllm import engine_arguments

    thrown: list[bool] = []
    monkeypatch.setattr(
        engine_arguments, "switch_lora_pdl_off", lambda: thrown.append(True) or True
    )
    settings = load_server_settings(["--model", str(tiny_model), *flags])
    with capture_logs() as logged:
        engine_arguments.parsed_engine_arguments(settings, PlannedWeights())
    assert thrown == [True] * len(flags)
    assert len(logged) == len(flags)


@pytest.mark.parametrize("dtype", ["float32", "float"])
def test_adapters_in_float32_are_refused_by_name(internals: ModuleType, dtype: str) -> None:
    """On a GPU, where vLLM's LoRA kernels assert a 16-bit type in the middle of a request."""
    assert internals
    from grpo_vllm.engine_arguments import refuse_float32_adapters

    with pytest.raises(SystemExit, match="pass --dtype bfloat16"):
        refuse_float32_adapters(dtype)
    refuse_float32_adapters("bfloat16")
