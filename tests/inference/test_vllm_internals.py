"""The parts of vLLM that we use exist in the installed version and behave as expected.

Runs with any version, with or without a GPU; starts no engine.
"""

from __future__ import annotations

import ast
import inspect
import os
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.inference.vllm_hooks import (
    HOOKS,
    SAMPLING_PARAMETERS,
    Hook,
    ImportedVllm,
    installed_vllm,
    module_and_path,
)


@pytest.fixture(scope="module")
def internals() -> ModuleType:
    """vLLM's import warns about its own dependencies, which we cannot change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from grpo_vllm.engine import vllm_compat
        from grpo_vllm.engine.vllm_compat import launch, layers, requests, staged_update

        assert staged_update
        assert layers
        assert requests
        if launch.current_platform.is_cpu():
            from grpo_vllm.engine.vllm_compat import cpu

            assert cpu
    return vllm_compat


@pytest.fixture
def environment() -> Iterator[None]:
    """vLLM sets environment variables when it creates a configuration."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.places[0])
def test_it_is_there(internals: ModuleType, hook: Hook) -> None:
    if installed_vllm() < hook.since:
        pytest.skip(f"only from vLLM {hook.since[0]}.{hook.since[1]} on")
    if hook.device == "cuda" and not internals.launch.current_platform.is_cuda():
        pytest.skip("no GPU: vLLM is built for another platform here")
    if hook.device == "cpu" and not internals.launch.current_platform.is_cpu():
        pytest.skip("only on CPU: vLLM is built for another platform here")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        problem = hook.problem(ImportedVllm())
    assert problem is None


def test_the_table_has_everything_that_is_imported(internals: ModuleType) -> None:
    known = set()
    for hook in HOOKS:
        for module, path in map(module_and_path, hook.places):
            known |= {module, f"{module}.{path}", f"{module}.{path.split('.')[0]}"}
    imported = {
        f"{node.module}.{alias.name}"
        for module in vars(internals).values()
        if isinstance(module, ModuleType)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm")
        for alias in node.names
    }
    assert imported - known == set()


def test_vllm_has_no_sampling_parameter_that_nobody_has_looked_at(internals: ModuleType) -> None:
    names = {name for name in internals.requests.SamplingParams.__struct_fields__ if name[0] != "_"}
    assert names <= SAMPLING_PARAMETERS


@pytest.mark.usefixtures("environment")
def test_obstacles_to_sharing_are_listed_at_once_but_each_cause_only_once(
    internals: ModuleType, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test sets the fields directly, because no platform supports all of the options."""
    from vllm.model_executor.layers.attention import MLAAttention

    why_not_shareable = internals.layers.why_not_shareable
    config, no_layers = engine_config(internals, tiny_model), nn.Module()
    model, offload = config.model_config, config.offload_config
    assert why_not_shareable(config, no_layers) == []
    config.speculative_config = SimpleNamespace(method="ngram")  # a draft without weights
    # Experts are detected by the class of their layers, not by the model's name.
    experts = [layer_of(internals, "UnquantizedFusedMoEMethod") for _ in range(4)]
    latent = MLAAttention.__new__(MLAAttention)
    nn.Module.__init__(latent)
    plain = layer_of(internals, "UnquantizedLinearMethod")
    packed = nn.ModuleList([plain, latent, *experts])
    (layers,) = why_not_shareable(config, packed)
    assert "(1: MLAAttention, 2: UnquantizedFusedMoEMethod, 3: UnquantizedFused" in layers
    assert "MoEMethod, and 2 more)" in layers
    config.parallel_config.enable_expert_parallel = True
    model.quantization = "fp8"
    monkeypatch.setattr(type(model), "use_mla", True)
    monkeypatch.setattr(type(model), "get_num_experts", lambda _: 64)
    model.enable_sleep_mode = model.enable_cumem_allocator = True
    offload.uva.cpu_offload_gb, offload.prefetch.offload_group_size = 2.5, 3
    config.speculative_config.method = "eagle3"
    lines = why_not_shareable(config, packed)
    for line, words in zip(
        lines,
        (
            "quantised weights (fp8)",
            "(MLA)",
            "mixture of experts (64)",
            "speculative decoding (eagle3)",
            "--enable-expert-parallel",
            "--enable-sleep-mode",
            "--cpu-offload-gb 2.5",
            "--offload-group-size 3",
        ),
        strict=True,
    ):
        assert words in line
    model.enable_sleep_mode = False
    assert any("--enable-cumem-allocator" in line for line in why_not_shareable(config))


def engine_config(internals: ModuleType, model: Path) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = internals.launch.parse_engine_arguments(["--model", str(model)])
        return AsyncEngineArgs.from_cli_args(arguments).create_engine_config()


def layer_of(internals: ModuleType, method: str) -> nn.Module:
    """A layer without weights that this method serves."""
    from vllm.model_executor.layers import fused_moe

    kind = getattr(fused_moe, method, None) or getattr(internals.layers, method)
    made = nn.Module()
    made.quant_method = kind.__new__(kind)
    if isinstance(made.quant_method, nn.Module):
        nn.Module.__init__(made.quant_method)
    return made


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("capability", "given", "value"),
    [((10, 3), None, "1"), ((10, 3), "0", "0"), ((9, 0), None, None)],
    ids=["Blackwell", "Blackwell, set by the user", "Hopper"],
)
def test_lora_kernels_go_without_pdl_on_datacentre_blackwell_unless_the_user_wants_it(
    internals: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    given: str | None,
    value: str | None,
) -> None:
    from vllm.platforms.interface import DeviceCapability

    found = DeviceCapability(*capability)
    gpu = SimpleNamespace(is_cuda=lambda: True, get_device_capability=lambda: found)
    monkeypatch.setattr(internals.launch, "current_platform", gpu)
    os.environ.pop("VLLM_LORA_DISABLE_PDL", None)
    os.environ.update({"VLLM_LORA_DISABLE_PDL": given} if given is not None else {})
    assert internals.launch.switch_lora_pdl_off() is (value == "1")
    assert os.environ.get("VLLM_LORA_DISABLE_PDL") == value


@pytest.mark.usefixtures("internals")
def test_what_is_ours_reaches_vllm_in_no_other_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from grpo_core.settings import load_settings
    from grpo_core.tree.server import ServerSettings
    from grpo_core.weights.ref import WeightRef
    from grpo_vllm.engine.args import parsed_engine_arguments

    def parsed(*flags: str) -> Any:
        settings = load_settings(ServerSettings, ["--model", "m", *flags])
        return parsed_engine_arguments(settings, WeightRef())

    file = tmp_path / "vllm.yaml"
    file.write_text("api-key: k\n")
    with pytest.raises(SystemExit, match="2"):
        parsed("--api-ke", "k")
    assert "did you mean --api-key?" in capsys.readouterr().err
    for flags in (["--api-key", "k", "k2"], ["--logprobs-mod", "raw_logprobs"]):
        with pytest.raises(SystemExit, match="the server sets these options of vLLM itself"):
            parsed(*flags)
    assert parsed("--api-key", "k", "-tp", "2").api_key == ["k"]
    assert parsed("--config", str(file)).api_key == ["k"]


@pytest.mark.usefixtures("internals")
def test_adapters_in_float32_are_refused_by_name() -> None:
    """On a GPU vLLM's LoRA kernels require a 16-bit type and fail during a request."""
    from grpo_vllm.engine.args import refuse_float32_adapters

    for dtype in ("float32", "float"):
        with pytest.raises(SystemExit, match="pass --dtype bfloat16"):
            refuse_float32_adapters(dtype)
    refuse_float32_adapters("bfloat16")


async def test_an_engine_that_fails_is_no_fault_of_the_request(internals: ModuleType) -> None:
    """vLLM 0.33 raises its errors of the server unwrapped, for example while it is paused."""
    from grpo_core.wire.policy_version import PolicyVersion
    from grpo_vllm.routes.generate_request import GenerateRequest
    from grpo_vllm.routes.running_request import GenerationFailed, RunningRequest

    async def generate(*_: Any, **__: Any) -> AsyncIterator[Any]:
        raise internals.requests.VLLMServerError("Generation is paused")
        yield

    sampling = internals.requests.SamplingParams()
    request = GenerateRequest([1], None, sampling, stream=False)
    running = RunningRequest(SimpleNamespace(generate=generate), request, PolicyVersion)
    with pytest.raises(GenerationFailed, match="Generation is paused"):
        await anext(running.advance())


def test_the_backend_that_loads_weights_lacks_no_method(internals: ModuleType) -> None:
    """vLLM 0.24 requires other methods than vLLM 0.32."""
    assert internals.staged_update.StagedUpdate.__abstractmethods__ == frozenset()


def test_a_bias_that_the_kernel_keeps_in_float32_is_rounded_as_in_a_new_engine(
    internals: ModuleType,
) -> None:
    """Only CPUs with AMX have such a kernel."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    layer = torch.nn.Linear(4, 3, dtype=torch.bfloat16)
    record_metadata_for_reloading(layer)
    loaded = torch.tensor([0.1, 0.2, 0.3])
    layer.bias.data = loaded.clone()
    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]
    internals.staged_update.round_biases(layer)
    assert torch.equal(layer.bias.data, loaded.bfloat16().float())


def test_readme_names_the_sizes_of_heads_that_vllm_computes_on_a_cpu(internals: ModuleType) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert internals
    readme = " ".join((Path(__file__).parents[2] / "README.md").read_text().split())
    claimed = readme.split("heads of size ")[1].split(", and")[0]
    sizes = [int(word) for word in claimed.replace(" or", ",").split(", ")]
    assert sizes == CPUAttentionBackend.get_supported_head_sizes()


@pytest.mark.usefixtures("environment")
def test_workers_of_one_host_join_a_group_and_those_of_several_do_not(
    internals: ModuleType, tiny_model: Path
) -> None:
    """The workers of a server fill one directory."""
    from grpo_vllm.engine.main import _facts

    config = engine_config(internals, tiny_model)
    engine = SimpleNamespace(vllm_config=config, model_config=config.model_config)
    config.parallel_config.world_size = 2
    assert _facts(engine, loads_weights=True)["workers"] == 2
    config.parallel_config.nnodes = 2
    assert _facts(engine, loads_weights=True)["workers"] == 0
    config.parallel_config.nnodes = 1
    config.parallel_config.distributed_executor_backend = "ray"
    assert _facts(engine, loads_weights=True)["workers"] == 0
