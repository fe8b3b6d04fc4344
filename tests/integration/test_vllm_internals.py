"""Everything that we touch of vLLM is still there, in the installed version."""

from __future__ import annotations

import inspect

import pytest
import torch
from vllm.v1.engine.async_llm import AsyncLLM

from grpo_vllm import engine_internals
from grpo_vllm.loader import SharedModelLoader
from grpo_vllm.plain_layers import PlainEmbeddingMethod, PlainLinearMethod


@pytest.mark.parametrize("name", engine_internals.__all__)
def test_names(name: str) -> None:
    assert getattr(engine_internals, name) is not None


@pytest.mark.parametrize(
    "method", ["load_weights", "get_all_weights", "load_model", "create_model"]
)
def test_the_loader_overrides_methods_that_exist(method: str) -> None:
    assert callable(getattr(engine_internals.DefaultModelLoader, method))
    assert issubclass(SharedModelLoader, engine_internals.DefaultModelLoader)


@pytest.mark.parametrize("plain", [PlainLinearMethod, PlainEmbeddingMethod])
def test_layers_still_serve_through_the_kernel_attribute(plain: type) -> None:
    """The plain layout hangs on one hook and one attribute."""
    layer = torch.nn.Linear(2, 2)
    plain.__new__(plain).process_weights_after_loading(layer)
    assert layer.cpu_linear is torch.nn.functional.linear
    source = inspect.getsource(inspect.getmodule(engine_internals.UnquantizedLinearMethod))
    assert "cpu_linear" in source


def test_the_engine_client_pauses_resumes_and_calls_workers() -> None:
    pause = inspect.signature(AsyncLLM.pause_generation).parameters
    assert {"mode", "clear_cache"} <= set(pause)
    for method in ("resume_generation", "collective_rpc", "generate", "get_supported_tasks"):
        assert callable(getattr(AsyncLLM, method))
    assert isinstance(AsyncLLM.errored, property)


def test_the_server_is_built_from_vllms_own_parts() -> None:
    for name in ("build_app", "init_app_state", "build_async_engine_client"):
        assert callable(getattr(engine_internals._server(), name))
