"""How large a run is where the user says nothing: a step takes seconds on two cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from grpo_local.modes import Mode
from grpo_local.settings import DemoSettings, TaskName

EVERY_LINEAR_LAYER = tuple(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))
"""An adapter on two layers alone cannot teach the tiny model much."""
LORA_LR_FACTOR = 6.0
"""The tiny model learns faster from an adapter at 2e-3 than at 1e-3; from 3e-3 on every step clips
a fifth of its tokens."""
STEPS_WITH_RESTARTS = 60
"""A restart takes about 20 s even with the tiny model: six of them are enough to wait for."""
RESTART_DEADLINE_S = 180.0
"""Other programs may slow a restart down as they slow a start down."""


@dataclass(frozen=True)
class Sizes:
    """Everything whose default depends on the task, the model or the mode. Names as in
    `DemoSettings`."""

    steps: int
    batch_size: int
    gradient_accumulation_steps: int
    max_completion_tokens: int
    seq_len: int
    max_model_len: int
    kv_cache_mib: int
    lr: float = 3e-4
    step_deadline_s: float = 300.0
    server_deadline_s: float = 600.0
    start_deadline_s: float = 300.0
    vllm_restart_interval: int = 10
    lora_target_modules: Sequence[str] = EVERY_LINEAR_LAYER


BY_TASK: Mapping[TaskName, Sizes] = {
    "arithmetic": Sizes(
        steps=250,
        batch_size=64,
        gradient_accumulation_steps=2,
        max_completion_tokens=8,
        seq_len=128,
        max_model_len=512,
        kv_cache_mib=64,
    ),
    # With one token per character a problem has 120 to 1,072 tokens, template included. The tiny
    # model says a few digits; what runs on is cut off soon, since it costs the most and is worth 0.
    "gsm8k": Sizes(
        steps=60,
        batch_size=16,
        gradient_accumulation_steps=2,
        max_completion_tokens=32,
        seq_len=1152,
        max_model_len=1536,
        kv_cache_mib=256,
        # At 3e-4 half of the tokens of the first steps are clipped: text is new to the tiny model.
        lr=1e-4,
    ),
}
"""For the tiny model."""

REASONING_TOKENS: Mapping[TaskName, int] = {"arithmetic": 8, "gsm8k": 256}
"""Longest completion of a model that can reason."""


def sizes_for(settings: DemoSettings) -> Sizes:
    """The defaults of the task with the longest sequences, under what the user has set."""
    sizes = max((BY_TASK[task] for task in settings.task), key=lambda sizes: sizes.seq_len)
    if settings.model is not None:
        sizes = _for_a_model_of_the_user(sizes, settings)
    sizes = _for_the_mode(sizes, settings.weight_mode)
    names = [field.name for field in fields(Sizes)]
    given = {name: value for name in names if (value := getattr(settings, name)) is not None}
    chosen = replace(sizes, **given)
    if "max_model_len" not in given:
        chosen = replace(chosen, max_model_len=max(chosen.max_model_len, chosen.seq_len))
    return chosen


def _for_a_model_of_the_user(sizes: Sizes, settings: DemoSettings) -> Sizes:
    """It has learnt something that a high learning rate would destroy, and it takes its time."""
    return replace(
        sizes,
        max_completion_tokens=max(REASONING_TOKENS[task] for task in settings.task),
        lr=1e-5,
        lora_target_modules=(),  # the trainer's default
        step_deadline_s=1800.0,
        server_deadline_s=1800.0,
        start_deadline_s=600.0,
    )


def _for_the_mode(sizes: Sizes, mode: Mode) -> Sizes:
    if mode.trains_adapter:
        sizes = replace(sizes, lr=LORA_LR_FACTOR * sizes.lr)
    if mode.restarts_engine:
        sizes = replace(
            sizes,
            steps=min(sizes.steps, STEPS_WITH_RESTARTS),
            step_deadline_s=sizes.step_deadline_s + RESTART_DEADLINE_S,
        )
    return sizes
