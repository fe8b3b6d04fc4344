from __future__ import annotations

import pytest
import torch

from grpo_trainer.device import device_to_load_on, require_device
from grpo_trainer.errors import NoSuchDevice, PolicyMismatch
from grpo_trainer.settings import parse_settings

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@NO_GPU
def test_auto_is_the_host_where_there_is_no_gpu() -> None:
    assert device_to_load_on("auto") == torch.device("cpu")


@NO_GPU
@pytest.mark.parametrize("wanted", ["cuda", "cuda:3"])
def test_a_gpu_that_is_not_there(wanted: str) -> None:
    with pytest.raises(NoSuchDevice, match=f"--device {wanted}: torch .* finds no GPU"):
        device_to_load_on(wanted)


@pytest.mark.parametrize(
    ("wanted", "shared"), [("auto", "cuda:1"), ("cuda", "cuda:1"), ("cuda:1", "cuda:1")]
)
def test_the_device_of_shared_weights_is_theirs(wanted: str, shared: str) -> None:
    require_device(wanted, torch.device(shared))


@pytest.mark.parametrize(
    ("wanted", "shared"), [("cpu", "cuda:1"), ("cuda:0", "cuda:1"), ("cuda", "cpu")]
)
def test_another_device_than_that_of_shared_weights(wanted: str, shared: str) -> None:
    with pytest.raises(PolicyMismatch, match=f"--device {wanted}, but .* are on {shared}"):
        require_device(wanted, torch.device(shared))


@pytest.mark.parametrize("wanted", ["gpu", "cuda:", "cuda:x", "xcuda", "CPU"])
def test_a_device_that_is_none(wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(["--model-name", "m", "--device", wanted])
    assert "device" in capsys.readouterr().err
