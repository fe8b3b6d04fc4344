"""Mistakes on the command lines of `grpo-demo`, `grpo-compare` and `grpo-run`."""

from __future__ import annotations

import sys

import pytest

from grpo_local.__main__ import compare, run
from grpo_local.__main__ import main as demo

MISTAKES = {
    demo: {
        "--task gsm8k": "--data: gsm8k needs data: pass --data (with make: DATA=)",
        "--task gsm8k --data /none": "--data: no such directory",
        "--seq-len 100 --max-model-len 50": "less than --seq-len 100",
        "--mode lora": "expected one of shared_vllm, lora_only, lora_restart, none",
    },
    compare: {
        "--modes none,some": "--modes: expected one of shared_vllm",
        "--side-by-side --gpu-ids 0,1": "2 --gpu-ids for 4 --modes",
        "-- --mode none": "grpo-compare: --mode: the same for all, or set here",
    },
    run: {
        "-- --lora_r=8 --save-path x": "grpo-run: --lora-r, --save-path: grpo-run's own; say it",
        "--server-flags='half": "--server-flags: No closing quotation",
        "--port 8000 --health-port 8000": "--port and --health-port are both 8000",
    },
}
REQUIRED = {run: ["--model", "m", "--redis-url", "redis://127.0.0.1:1/0"]}


@pytest.mark.parametrize("command", MISTAKES, ids=["demo", "compare", "run"])
def test_a_mistake_ends_with_status_2_and_names_the_option(
    command: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(command)
    for arguments, problem in MISTAKES[command].items():
        argv = ["command", *REQUIRED.get(command, []), *arguments.split()]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as ended:
            command()
        said = capsys.readouterr()
        assert (ended.value.code, said.out) == (2, ""), arguments
        assert problem in said.err
