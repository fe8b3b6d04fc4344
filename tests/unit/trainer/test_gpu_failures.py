"""The trainer ends with our name of a failed GPU, where it failed, and the plan of its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from grpo_core.tree.trainer import ForwardOptions
from grpo_trainer import __main__ as grpo
from grpo_trainer.memory_plan import GIB, MemoryBudget, memory_plan, with_micro_batch
from grpo_trainer.model.forward import FastForward, build_forward_pass
from grpo_trainer.model.loading import device_to_load_on
from grpo_trainer.ranks import ALONE
from tests.unit.trainer.forward_rig import qwen
from tests.unit.trainer.ranks.test_loop import settings_of
from tests.unit.trainer.tiny_policy import model_directory

GPU = MemoryBudget(True, "a GPU", 80 * GIB, GIB, 2 * GIB)


@pytest.fixture
def ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Exception], tuple[str, str]]:
    """Name and reason in the last line of a trainer whose step raises the error."""
    model = model_directory(tmp_path / "model")

    def run(error: Exception) -> tuple[str, str]:
        def a_step(*_: object) -> None:
            raise error

        monkeypatch.setattr(grpo, "_train", a_step)
        monkeypatch.setattr(grpo, "configure_logging", lambda *_: None)
        with capture_logs() as lines, pytest.raises(SystemExit, match="1"):
            grpo.main(["--model", str(model), "--mode", "none", "--save-path", str(tmp_path / "s")])
        return lines[-1]["event"], lines[-1]["reason"]

    return run


def test_too_little_memory_is_named_with_the_plan_and_options_that_need_less(
    ended: Callable[[Exception], tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    text = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79 GiB"
    name, reason = ended(torch.OutOfMemoryError(text))
    assert name == "OutOfMemory"
    assert reason.startswith(f"OutOfMemoryError: {text}. To do: try --gradient-checkpointing")
    assert "The plan: trainer " in reason
    assert "They fit" in reason
    assert ", in a_step" in capsys.readouterr().err


def test_a_failed_gpu_is_named_with_how_to_go_on(
    ended: Callable[[Exception], tuple[str, str]],
) -> None:
    name, reason = ended(torch.AcceleratorError("CUDA error: unspecified launch failure\nSearch"))
    assert name == "GpuFailed"
    assert reason.endswith("start the trainer again, and it resumes")


def test_other_errors_keep_their_traceback(
    ended: Callable[[Exception], tuple[str, str]],
) -> None:
    with pytest.raises(RuntimeError, match="expected scalar type"):
        ended(RuntimeError("expected scalar type Float but found Half"))


def test_memory_that_other_processes_use_is_named_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"tokens_per_micro_batch": None}
    settings = settings_of(model_directory(tmp_path / "model"), tmp_path / "run", 1, given)
    policy = memory_plan(settings).policy

    def hints(free_bytes: int) -> list[str]:
        machine = replace(GPU, free_bytes=free_bytes)
        monkeypatch.setattr(MemoryBudget, "find", lambda _: machine)
        with capture_logs() as lines:
            with_micro_batch(settings, policy, ALONE, None)
        return [line["hint"] for line in lines if "hint" in line]

    (hint,) = hints(2**20)
    assert hint.endswith(" GiB needed, 0.001 free: see nvidia-smi for others")
    assert hints(80 * GIB) == []


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("The NVIDIA driver on your system is too old (found version 11040).", "update the driver"),
        ("Found no NVIDIA driver on your system.", "install for DEVICE=cpu"),
    ],
)
def test_why_there_is_no_gpu(text: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(Exception, match=f"--device cuda: torch .* finds no GPU. .*{advice}"):
        device_to_load_on("cuda")


def test_a_gpu_that_fails_while_a_faster_way_is_tried_is_no_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(FastForward, "__call__", fail)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        build_forward_pass(qwen(), ForwardOptions())
