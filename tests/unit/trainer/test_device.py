from __future__ import annotations

import pytest
import torch

from grpo_trainer.device import device_to_load_on, require_device
from grpo_trainer.errors import NoSuchDevice, PolicyMismatch
from grpo_trainer.settings import parse_settings


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_auto_is_the_host_and_a_gpu_is_refused() -> None:
    assert device_to_load_on("auto") == torch.device("cpu")
    for wanted in ("cuda", "cuda:3"):
        with pytest.raises(NoSuchDevice, match=f"--device {wanted}: torch .* finds no GPU"):
            device_to_load_on(wanted)


@pytest.mark.parametrize(
    ("wanted", "shared", "fits"),
    [
        ("auto", "cuda:1", True),
        ("cuda", "cuda:1", True),
        ("cuda:1", "cuda:1", True),
        ("cpu", "cuda:1", False),
        ("cuda:0", "cuda:1", False),
        ("cuda", "cpu", False),
    ],
)
def test_the_device_of_shared_weights_is_the_servers(wanted: str, shared: str, fits: bool) -> None:
    if fits:
        require_device(wanted, torch.device(shared))
        return
    with pytest.raises(PolicyMismatch, match=f"--device {wanted}, but .* are on {shared}"):
        require_device(wanted, torch.device(shared))


@pytest.mark.parametrize("wanted", ["gpu", "cuda:", "xcuda"])
def test_a_device_with_no_such_name_is_refused(
    wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_settings(["--model-name", "m", "--device", wanted])
    assert "--device" in capsys.readouterr().err
