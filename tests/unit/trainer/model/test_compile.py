"""torch.compile of the layers gives the same numbers and keeps the parameters' addresses.

Tracing and differentiation do not depend on the generated code. So backend "aot_eager" is enough:
it runs the traced operations one by one and skips the slow code generation.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from grpo_trainer.config.forward import ForwardOptions
from grpo_trainer.errors import FastPathRefused, MissingPackage
from grpo_trainer.model import forward, packed_attention
from grpo_trainer.model.forward import FastForward, build_forward_pass, plain_forward
from grpo_trainer.model.fused_head import EAGER
from grpo_trainer.model.packing import PACKED
from grpo_trainer.model.policy import base_model, compile_layers
from tests.unit.trainer.forward_rig import adapted, outcome, qwen, ragged, require_equal

TRACED = "aot_eager"
FAST = FastForward(PACKED, EAGER)
EVERYTHING = ForwardOptions(packing="on", fused_head="on", compile=True)
RECOMPUTED = EVERYTHING.model_copy(update={"gradient_checkpointing": True})

# torch.compile uses deprecated functions of torch. It suppresses its own warnings, but not those
# that pytest turns into errors.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.full
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
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here, which torch.compile needs")
@pytest.mark.parametrize("options", [EVERYTHING, RECOMPUTED])
def test_everything_at_once_really_compiled(options: ForwardOptions) -> None:
    policy, micro = qwen(num_hidden_layers=1), ragged()
    expected = outcome(policy, plain_forward, micro)
    require_equal(outcome(policy, build_forward_pass(policy, options), micro), expected)


def test_compiled_code_that_answers_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrongly_compiled(model: Any) -> None:
        model.model.layers[0].register_forward_hook(lambda _m, _i, out: 2 * out)

    monkeypatch.setattr(forward, "require_compiler", lambda _: None)
    monkeypatch.setattr(forward, "compile_layers", wrongly_compiled)
    with pytest.raises(FastPathRefused, match=r"--compile: .* differ by .*; omit --compile"):
        build_forward_pass(qwen(), ForwardOptions(packing="off", fused_head="off", compile=True))


def test_a_run_without_a_compiler_ends_before_it_touches_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    policy = qwen()
    with pytest.raises(MissingPackage, match=r"there is no g\+\+ .* omit --compile"):
        build_forward_pass(policy, EVERYTHING)
    assert policy.config._attn_implementation == packed_attention.DEFAULT
