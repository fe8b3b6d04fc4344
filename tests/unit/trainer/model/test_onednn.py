from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from grpo_core import cpu
from grpo_trainer.model import onednn
from grpo_trainer.model.onednn import OneDnnLinear

INPUTS, OUTPUTS = 24, 40


@pytest.fixture(autouse=True)
def on_any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "CPU", dataclasses.replace(cpu.CPU, is_faster_with_onednn=True))


def layer(has_bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(INPUTS, OUTPUTS, bias=has_bias)


def enabled(plain: nn.Linear) -> nn.Module:
    onednn.enable(nn.Sequential(plain))  # type: ignore[arg-type]
    return plain


def gradients(module: nn.Module, inputs: Tensor) -> list[Tensor]:
    found = module(inputs).mul_(2)  # some models change the output in place
    return [found, *torch.autograd.grad(found.sin().sum(), [inputs, *module.parameters()])]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(INPUTS,), (7, INPUTS), (2, 3, INPUTS), (0, INPUTS)])
def test_values_and_gradients_are_those_of_a_linear_layer(
    shape: tuple[int, ...], has_bias: bool
) -> None:
    inputs = torch.randn(shape, requires_grad=True)
    expected = gradients(layer(has_bias), inputs)
    module = enabled(layer(has_bias))
    assert type(module) is OneDnnLinear
    torch.testing.assert_close(gradients(module, inputs), expected)


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_compiled_code_reads_the_weights_of_now() -> None:
    module, compiled = enabled(layer()), enabled(layer())
    compiled.compile(dynamic=True)
    for rows in (5, 3):
        inputs = torch.randn(rows, INPUTS, requires_grad=True)
        torch.testing.assert_close(gradients(compiled, inputs), gradients(module, inputs))
        for changed in (module, compiled):
            changed.weight.data.mul_(2)  # type: ignore[operator, union-attr]


@pytest.mark.parametrize(("is_frozen", "saved"), [(True, ["weight"]), (False, ["input", "weight"])])
def test_a_frozen_layer_keeps_no_inputs(is_frozen: bool, saved: list[str]) -> None:
    """They would fill the memory that an adapter saves."""
    module = enabled(layer().requires_grad_(not is_frozen))
    inputs = torch.randn(5, INPUTS, requires_grad=True)
    shapes = {inputs.shape: "input", torch.Size((OUTPUTS, INPUTS)): "weight"}
    found = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: found.append(shapes[tensor.shape]), lambda _: None
    ):
        module(inputs)
    assert found == saved


@pytest.mark.parametrize("other", [layer().to(torch.bfloat16), layer().to("meta")])
def test_other_types_and_devices_are_left_alone(other: nn.Linear) -> None:
    assert type(enabled(other)) is nn.Linear


def test_disabling_leaves_linear_layers() -> None:
    model = nn.Sequential(enabled(layer()))
    onednn.disable(model)  # type: ignore[arg-type]
    assert type(model[0]) is nn.Linear
