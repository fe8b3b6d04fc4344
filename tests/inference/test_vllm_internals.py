"""Everything that we touch of vLLM is still there, in the installed version."""

from __future__ import annotations

import inspect
import warnings
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def internals() -> ModuleType:
    """Importing vLLM warns about its own dependencies; that is not ours to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from grpo_vllm import engine_internals, loader, plain_layers

        assert loader
        assert plain_layers
    return engine_internals


def test_names(internals: ModuleType) -> None:
    missing = [name for name in internals.__all__ if getattr(internals, name, None) is None]
    assert missing == []


def test_the_loader_overrides_methods_that_exist(internals: ModuleType) -> None:
    from grpo_vllm.loader import SharedModelLoader

    stock = internals.DefaultModelLoader
    overridden = {"load_weights", "get_all_weights", "load_model"}
    assert overridden <= set(vars(SharedModelLoader))
    assert all(callable(getattr(stock, method, None)) for method in overridden)


def test_layers_still_serve_through_the_kernel_attribute(internals: ModuleType) -> None:
    """The plain layout hangs on one hook and one attribute."""
    from grpo_vllm.plain_layers import PlainEmbeddingMethod, PlainLinearMethod

    for plain in (PlainLinearMethod, PlainEmbeddingMethod):
        layer = torch.nn.Linear(2, 2)
        plain.__new__(plain).process_weights_after_loading(layer)
        assert layer.cpu_linear is torch.nn.functional.linear
    from vllm.model_executor.layers import utils

    assert "cpu_linear" in inspect.getsource(utils.cpu_unquantized_gemm)
    assert issubclass(PlainLinearMethod, internals.UnquantizedLinearMethod)


def test_the_engine_client_pauses_resumes_and_calls_workers(internals: ModuleType) -> None:
    assert internals
    from vllm.v1.engine.async_llm import AsyncLLM

    pause = inspect.signature(AsyncLLM.pause_generation).parameters
    assert {"mode", "clear_cache"} <= set(pause)
    methods = "resume_generation collective_rpc generate get_supported_tasks get_tokenizer"
    for method in (*methods.split(), "reset_prefix_cache", "sleep", "wake_up"):
        assert callable(getattr(AsyncLLM, method))
    assert isinstance(AsyncLLM.errored, property)


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


def test_there_is_no_sleep_on_cpu(internals: ModuleType) -> None:
    """vLLM's CPU worker would say "asleep" and do nothing."""
    assert "no sleep mode" in internals.why_no_sleep(None)


def test_handlers_of_engine_errors_find_the_server(internals: ModuleType) -> None:
    assert internals
    from vllm.entrypoints.serve.exception_handling.handlers import vllm_error

    assert "app.state.server" in inspect.getsource(vllm_error)


def test_the_server_is_built_from_vllms_own_parts(internals: ModuleType) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = internals._server()
    for name in ("build_app", "init_app_state"):
        assert callable(getattr(parts, name))
