from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_core.settings import load_settings
from grpo_local.settings import DemoSettings
from grpo_local.sizes import BY_TASK, Sizes, sizes_for

LONGEST_GSM8K_PROMPT = 1072
"""Tokens of the longest training problem with one token per byte, instruction and template."""


@pytest.fixture
def sizes(tmp_path: Path) -> Callable[..., Sizes]:
    """Of a demo with these options."""

    def of(*argv: str) -> Sizes:
        return sizes_for(load_settings(DemoSettings, ["--data", str(tmp_path), *argv]))

    return of


def test_every_problem_of_gsm8k_fits_with_its_completion(sizes: Callable[..., Sizes]) -> None:
    of_gsm8k = sizes("--task", "gsm8k")
    assert LONGEST_GSM8K_PROMPT + of_gsm8k.max_completion_tokens < of_gsm8k.seq_len
    assert of_gsm8k.seq_len <= of_gsm8k.max_model_len


def test_several_tasks_get_the_sizes_of_the_largest(
    sizes: Callable[..., Sizes], monkeypatch: pytest.MonkeyPatch
) -> None:
    twice = ("--task", "arithmetic,gsm8k", "--task", "gsm8k")
    assert load_settings(DemoSettings, [*twice, "--data", "x"]).task == ["arithmetic", "gsm8k"]
    assert sizes(*twice) == BY_TASK["gsm8k"]
    monkeypatch.setenv("GRPO_DEMO_TASK", "gsm8k,arithmetic")  # written like the option
    assert sizes() == BY_TASK["gsm8k"]


def test_options_win_and_the_server_makes_room_for_them(sizes: Callable[..., Sizes]) -> None:
    given = ("--task", "gsm8k", "--steps", "7", "--lr", "1e-6", "--seq-len", "4000")
    expected = replace(BY_TASK["gsm8k"], steps=7, lr=1e-6, seq_len=4000, max_model_len=4000)
    assert sizes(*given) == expected
    assert sizes(*given, "--max-model-len", "5000") == replace(expected, max_model_len=5000)


def test_modes_and_models_change_pace_and_patience_alone(sizes: Callable[..., Sizes]) -> None:
    whole = BY_TASK["arithmetic"]
    assert sizes("--mode", "shared_vllm") == whole
    assert sizes("--mode", "none") == replace(whole, steps=60, step_deadline_s=480.0)
    assert sizes("--mode", "lora_only") == replace(whole, lr=6 * whole.lr)
    own = sizes("--mode", "lora_only", "--model", "some/model", "--lr", "1e-6")
    assert (own.lr, own.lora_target_modules) == (1e-6, ())
    assert own.step_deadline_s > whole.step_deadline_s
