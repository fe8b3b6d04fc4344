from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from grpo_trainer.model.onednn import OneDnnLinear, use_onednn

INPUTS, OUTPUTS = 256, 320


def layer(has_bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(INPUTS, OUTPUTS, bias=has_bias)


def used(plain: nn.Linear) -> nn.Module:
    use_onednn(nn.Sequential(plain))  # type: ignore[arg-type]
    return plain


def gradients(module: nn.Module, inputs: Tensor) -> list[Tensor]:
    found = module(inputs)
    wanted = [inputs, *module.parameters()]
    return [found, *torch.autograd.grad(found.sin().sum(), wanted)]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(7, INPUTS), (1, 3, INPUTS), (0, INPUTS)])
def test_values_and_gradients_are_those_of_a_linear_layer(
    shape: tuple[int, ...], has_bias: bool
) -> None:
    inputs = torch.randn(shape, requires_grad=True)
    expected = gradients(layer(has_bias), inputs)
    module = used(layer(has_bias))
    assert type(module) is OneDnnLinear
    torch.testing.assert_close(gradients(module, inputs), expected)


@pytest.mark.filterwarnings("ignore")  # of torch
def test_it_can_be_compiled() -> None:
    inputs = torch.randn(5, INPUTS, requires_grad=True)
    module = used(layer())
    expected = gradients(module, inputs)
    module.compile(dynamic=True)
    torch.testing.assert_close(gradients(module, inputs), expected)


@pytest.mark.parametrize(("is_frozen", "saved"), [(True, ["weight"]), (False, ["input", "weight"])])
def test_a_frozen_layer_keeps_no_inputs(is_frozen: bool, saved: list[str]) -> None:
    """They would fill the memory that an adapter saves."""
    module = used(layer().requires_grad_(not is_frozen))
    inputs = torch.randn(5, INPUTS, requires_grad=True)
    shapes = {inputs.shape: "input", torch.Size((OUTPUTS, INPUTS)): "weight"}
    found = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: found.append(shapes[tensor.shape]), lambda _: None
    ):
        module(inputs)
    assert found == saved


@pytest.mark.parametrize(
    "other", [nn.Linear(16, 16), layer().to(torch.bfloat16), layer().to("meta")]
)
def test_small_layers_other_types_and_other_devices_are_left_alone(other: nn.Linear) -> None:
    assert type(used(other)) is nn.Linear
