"""Layers are frozen, recomputed or compiled: values and the other gradients stay the same."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

from grpo_core.tree.objectives import GRPO
from grpo_core.tree.trainer import Choice, ForwardOptions
from grpo_trainer.errors import FastPathRefused, MissingPackage, PolicyMismatch
from grpo_trainer.learner import accumulate_gradients
from grpo_trainer.model import forward, packed_attention
from grpo_trainer.model import policy as policy_module
from grpo_trainer.model.adapter import adapter_dropouts, trained_parameters, with_adapter
from grpo_trainer.model.forward import (
    FastForward,
    ForwardPass,
    build_forward_pass,
    plain_forward,
)
from grpo_trainer.model.fused_head import EAGER
from grpo_trainer.model.logprobs import logprobs_of
from grpo_trainer.model.packing import PACKED, PADDED
from grpo_trainer.model.policy import (
    base_model,
    compile_choice,
    compile_layers,
    missing_compiler,
    train_only,
)
from tests.unit.trainer.forward_rig import (
    adapted,
    outcome,
    qwen,
    ragged,
    ragged_batch,
    require_equal,
)
from tests.unit.trainer.tiny_policy import LORA, optimizer_of

TRACED = "aot_eager"
"""A backend of torch.compile that runs the traced operations one by one and skips the slow code
generation: tracing and differentiation do not depend on the generated code."""
FAST = FastForward(PACKED, EAGER)
EVERYTHING = ForwardOptions(packing="on", fused_head="on", compile=True)
COMPILED = pytest.mark.filterwarnings("ignore")
"""torch.compile uses deprecated functions of torch. It suppresses its own warnings, but not those
that pytest turns into errors."""
RECOMPUTED = EVERYTHING.model_copy(update={"gradient_checkpointing": True})


def built(policy: Any, choice: Choice, gradient_checkpointing: bool) -> ForwardPass:
    options = ForwardOptions(
        packing=choice, fused_head=choice, gradient_checkpointing=gradient_checkpointing
    )
    return build_forward_pass(policy, options)


def test_only_the_named_layers_have_gradients_master_weights_and_new_values() -> None:
    whole, policy = qwen(num_hidden_layers=3), qwen(num_hidden_layers=3)
    train_only(policy, (1,))
    micro = ragged()
    logp, all_gradients = outcome(whole, plain_forward, micro)
    ours = {name: g for name, g in all_gradients.items() if name.startswith("model.layers.1.")}
    assert len(ours) == 12
    require_equal(outcome(policy, built(policy, "on", False), micro), (logp, ours))

    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    optimizer = optimizer_of(policy)
    plain_forward(policy, micro).logp.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step(0)
    optimizer.write_into_parameters()
    moved = {n for n, p in policy.named_parameters() if not torch.equal(p, before[n])}
    assert moved == ours.keys()
    assert sum(m.numel() for m in optimizer.masters) == sum(g.numel() for g in ours.values())
    assert not any(p.grad is not None for p in policy.parameters())


def test_a_layer_that_the_model_does_not_have_is_named_with_the_range() -> None:
    match = r"--train-layer-indices \[2, 7\]: the model has layers 0 to 1"
    with pytest.raises(PolicyMismatch, match=match):
        train_only(qwen(), (1, 2, 7))


@pytest.mark.parametrize("choice", ["off", "on"])
@pytest.mark.parametrize("make", [qwen, adapted])
def test_recomputed_layers_give_the_same_logprobs_and_gradients_from_less_memory(
    make: Callable[[], Any], choice: Choice
) -> None:
    policy, micro = make(), ragged()
    stored = built(policy, choice, False)
    with saved_bytes(policy) as before:
        expected = outcome(policy, stored, micro)
    recomputed = built(policy, choice, True)
    with saved_bytes(policy) as after:
        found = outcome(policy, recomputed, micro)
    require_equal(found, expected)
    assert sum(after) < 0.5 * sum(before)


def test_a_recomputed_layer_repeats_its_dropout() -> None:
    """The model switches dropout off after the forward pass. The backward pass needs it again."""
    steps = []
    for gradient_checkpointing in (False, True):
        policy = with_adapter(qwen(), LORA_WITH_DROPOUT).eval()
        chosen = built(policy, "off", gradient_checkpointing)
        torch.manual_seed(5)
        stats = accumulate_gradients(policy, ragged_batch(), GRPO, step=0, forward=chosen)
        gradients = {n: p.grad for n, p in trained_parameters(policy).items()}
        steps.append((stats.loss, gradients))
        assert not any(module.training for module in adapter_dropouts(policy))
    (loss, expected), (again, found) = steps
    assert again == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def test_a_model_that_cannot_recompute_its_layers_is_refused() -> None:
    policy = qwen()
    policy.supports_gradient_checkpointing = False
    with pytest.raises(FastPathRefused, match="Qwen2ForCausalLM does not support it; omit"):
        built(policy, "off", True)


LORA_WITH_DROPOUT = LORA.__class__(**vars(LORA) | {"dropout": 0.5})


@contextmanager
def saved_bytes(policy: Any) -> Iterator[list[int]]:
    """The size of each tensor that the forward pass stores for the backward pass."""
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    found: dict[int, int] = {}
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes
    sizes.extend(found.values())


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.full
@COMPILED
@pytest.mark.parametrize("make", [qwen, adapted])
def test_values_gradients_and_hooks_follow_the_parameters_wherever_they_are(
    make: Callable[[], Any],
) -> None:
    policy, eager, micro = make(), make(), ragged()
    before = {name: p.data_ptr() for name, p in policy.named_parameters()}
    fired = []
    trained = [name for name, p in policy.named_parameters() if p.requires_grad]
    for name in trained:
        policy.get_parameter(name).register_post_accumulate_grad_hook(
            lambda _, name=name: fired.append(name)
        )
    packed_attention.enable(base_model(policy))
    compile_layers(base_model(policy), TRACED)
    require_equal(outcome(policy, FAST, micro), outcome(eager, plain_forward, micro))
    assert {name: p.data_ptr() for name, p in policy.named_parameters()} == before
    assert sorted(fired) == sorted(trained)
    assert policy.state_dict().keys() == eager.state_dict().keys()

    with torch.no_grad():
        for parameter in (*policy.parameters(), *eager.parameters()):
            parameter.mul_(1.1)  # in place, like an update
            parameter.data = parameter.detach() * 0.9  # elsewhere, like after a server's restart
    require_equal(outcome(policy, FAST, micro), outcome(eager, plain_forward, micro))


@pytest.mark.full
@COMPILED
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here, which torch.compile needs")
@pytest.mark.parametrize("options", [EVERYTHING, RECOMPUTED])
def test_everything_at_once_really_compiled(options: ForwardOptions) -> None:
    policy, micro = qwen(num_hidden_layers=1), ragged()
    expected = outcome(policy, plain_forward, micro)
    require_equal(outcome(policy, build_forward_pass(policy, options), micro), expected)


CAUSES: dict[str, str] = {
    "wrong numbers": r"Qwen2ForCausalLM with and without torch.compile differ by",
    "compiler error": r"torch.compile fails: .*the compiler is of clay",
    "no list of layers": r"Qwen2ForCausalLM has no list of layers",
}


@pytest.fixture(params=CAUSES)
def cause(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes torch.compile fail; returns a pattern of the reason."""

    def fail(*_: Any) -> None:
        raise RuntimeError("the compiler is of clay")

    def wrong(graph: Any, _: Any) -> Any:
        """Doubles every floating-point result of a compiled part, but no shape."""
        return lambda *inputs: [
            2 * out if isinstance(out, Tensor) and out.is_floating_point() else out
            for out in graph.forward(*inputs)
        ]

    if request.param == "no list of layers":
        monkeypatch.setattr(policy_module, "layers_of", lambda _: None)
    else:
        backend: Any = {"wrong numbers": wrong, "compiler error": fail}[request.param]
        compiled = partial(compile_layers, backend=backend)
        monkeypatch.setattr(forward, "compile_layers", compiled)
    monkeypatch.setattr(forward, "missing_compiler", lambda _: None)
    return CAUSES[request.param]


@COMPILED
def test_a_refusal_of_compiled_code_ends_the_run_that_asked_for_it(cause: str) -> None:
    options = ForwardOptions(packing="off", fused_head="off", compile=True)
    with pytest.raises(FastPathRefused, match=f"(?s)^--compile: .*{cause}.*; omit --compile$"):
        build_forward_pass(qwen(), options)


@COMPILED
def test_code_that_is_compiled_for_many_tokens_is_compared_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong_for_many(graph: Any, _: Any) -> Any:
        def run(*inputs: Any) -> Any:
            found = graph.forward(*inputs)
            is_many = any(isinstance(out, Tensor) and out.shape[:1] > (4,) for out in found)
            return [2 * out for out in found] if is_many else found

        return run

    compiled = partial(compile_layers, backend=wrong_for_many)
    monkeypatch.setattr(forward, "compile_layers", compiled)
    monkeypatch.setattr(forward, "missing_compiler", lambda _: None)
    options = ForwardOptions(packing="off", fused_head="off", compile=True)
    assert build_forward_pass(qwen(), options) == FastForward(PADDED)
    monkeypatch.setitem(forward.COPIES, "cpu", 2)
    with pytest.raises(FastPathRefused, match=r"with and without torch.compile differ by"):
        build_forward_pass(qwen(), options)


@COMPILED
def test_layers_run_eagerly_if_compiled_code_is_refused_by_default(
    cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ForwardOptions(packing="off", fused_head="off")
    policy, eager, micro = qwen(), qwen(), ragged()
    expected = outcome(eager, build_forward_pass(eager, options), micro)
    on_gpu = compile_choice(None, "cuda", None)
    monkeypatch.setattr(forward, "compile_choice", lambda *_: on_gpu)
    with capture_logs() as events:
        chosen = build_forward_pass(policy, options)
    (warning,) = [event for event in events if event["log_level"] == "warning"]
    assert warning["option"] == "--compile"
    assert re.search(cause, warning["reason"])
    assert "omit" not in warning["reason"]
    assert chosen == FastForward(PADDED)
    assert not events[-1]["compiled"]
    found = outcome(policy, chosen, micro)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0)


@COMPILED
def test_one_compilation_serves_all_equal_layers_and_all_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = []

    def count(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(forward, "missing_compiler", lambda _: None)
    monkeypatch.setattr(forward, "compile_layers", partial(compile_layers, backend=count))
    counts = []
    for layers in (1, 3):
        torch.compiler.reset()
        policy = qwen(num_hidden_layers=layers)
        options = ForwardOptions(packing="off", fused_head="off", compile=True)
        with capture_logs() as events:
            chosen = build_forward_pass(policy, options)
        assert events[-1]["compiled"]
        assert events[-1]["compile_seconds"] >= 0
        counts.append(len(compiled))
        outcome(policy, chosen, ragged())
        logprobs_of(policy, [1, 2, 3])
        assert len(compiled) == counts[-1]
        compiled.clear()
    assert counts[0] == counts[1] > 0


LACK = "a compiler on cuda"


@pytest.mark.parametrize(
    ("typed", "device_type", "missing", "expected"),
    [
        (None, "cuda", None, "auto"),
        (None, "cuda", LACK, "off"),
        (None, "cpu", None, "off"),
        (None, "cpu", LACK, "off"),
        (True, "cuda", None, "on"),
        (True, "cpu", None, "on"),
        (False, "cuda", None, "off"),
        (False, "cuda", LACK, "off"),
    ],
)
def test_a_gpu_compiles_by_default(
    typed: bool | None, device_type: str, missing: str | None, expected: Choice
) -> None:
    with capture_logs() as events:
        assert compile_choice(typed, device_type, missing) == expected
    lines = [event["reason"] for event in events]
    reason = f"torch.compile needs {LACK}, or pass --no-compile"
    assert lines == ([reason] if (typed, device_type, missing) == (None, "cuda", LACK) else [])


@pytest.mark.parametrize(
    ("names", "match"),
    [
        ((), r"a compiler on cuda, but there is no gcc or clang: .* name a compiler in \$CC$"),
        (("gcc",), r"Triton on cuda, .* pip install triton$"),
        (("gcc", "triton"), None),
    ],
)
def test_what_a_gpu_lacks_is_named(
    names: tuple[str, ...], match: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    for name in names:
        program = tmp_path / ("bin/gcc" if name == "gcc" else "triton.py")
        program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    found = missing_compiler("cuda")
    assert (found is None) if match is None else re.search(match, str(found))


@COMPILED
@pytest.mark.parametrize("named", [False, True])
def test_compiled_code_is_kept_in_the_users_cache(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = str(tmp_path / "own") if named else default_cache_dir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", own)
    compile_layers(qwen())
    expected = tmp_path / ("own" if named else "grpo/torchinductor")
    assert cache_dir() == str(expected)


def test_a_run_without_a_compiler_ends_before_it_touches_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    policy = qwen()
    with pytest.raises(MissingPackage, match=r"there is no g\+\+ .* omit --compile"):
        build_forward_pass(policy, EVERYTHING)
    assert policy.config._attn_implementation == packed_attention.DEFAULT
