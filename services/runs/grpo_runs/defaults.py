"""Default sizes of a run by task, model and mode, such that a step takes seconds on two cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from grpo_core.tree.environment_values import AGENT, BRIDGES, environment_name
from grpo_core.tree.optim import OptimizerOptions
from grpo_core.tree.weights import LoraSettings
from grpo_runs.modes import Mode

EVERY_LINEAR_LAYER = tuple(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))
"""With an adapter on two layers the tiny model learns little."""
LORA_LR_FACTOR = 6.0
"""With an adapter the tiny model learns faster at 2e-3 than at 1e-3. From 3e-3 on, every step clips
a fifth of its tokens."""
PRETRAINED_STEPS = 60
PRETRAINED_BATCH = 32
"""With SmolLM2-135M, 64 sequences a step raise pass@1 within 25 steps on each task in examples/."""
PRETRAINED_LORA_LR_FACTOR = 30.0
"""With SmolLM2-135M and an adapter on q_proj and v_proj, 3e-4 learns two-digit sums as fast as 1e-5
does with all weights."""
STEPS_WITH_RESTARTS = 60
"""A restart takes seconds even with the tiny model, so a run has six of them."""
RESTART_DEADLINE_S = 180.0
"""Other programs on the machine can make a restart slow."""


@dataclass(frozen=True)
class RunSizes:
    """Options of a run whose default depends on the task, the model or the mode."""

    steps: int
    batch_size: int
    gradient_accumulation_steps: int
    max_completion_tokens: int | None
    """None: each task's own limit."""
    seq_len: int
    max_model_len: int
    kv_cache_mib: int | None
    """None: vLLM takes what the weights leave of its share of the GPU's memory."""
    lr: float = 3e-4
    """Of the tiny model; six times as high with an adapter. `sizes_for` gives a pretrained model
    the trainer's default (`OptimizerOptions.lr`, 1e-5), 30 times as high with an adapter. With
    --task, `LaunchOptions._fill_sizes` replaces the trainer's default by the result. Recipes have
    a default of their own, 1e-6 (`recipe/keys.yaml`)."""
    step_deadline_s: float = 300.0
    server_deadline_s: float = 600.0
    start_deadline_s: float = 300.0
    vllm_restart_interval: int | None = 10
    """None: the mode has another interval."""
    lora_target_modules: tuple[str, ...] = EVERY_LINEAR_LAYER
    gpu_memory_utilization: float = 0.4


BY_TASK: Mapping[str, RunSizes] = {
    "arithmetic": RunSizes(
        steps=250,
        batch_size=64,
        gradient_accumulation_steps=2,
        max_completion_tokens=8,
        seq_len=128,
        max_model_len=512,
        kv_cache_mib=64,
    ),
    # With one token per character a problem has 120 to 1,072 tokens, template included. The tiny
    # model answers with a few digits. Longer completions cost most and score 0: the limit is low.
    "gsm8k": RunSizes(
        steps=60,
        batch_size=16,
        gradient_accumulation_steps=2,
        max_completion_tokens=32,
        seq_len=1152,
        max_model_len=1536,
        kv_cache_mib=256,
        # Text is new to the tiny model: at 3e-4 half of the first steps' tokens are clipped.
        lr=1e-4,
    ),
}
"""For the tiny model."""

OTHER_TASK = replace(
    BY_TASK["arithmetic"], max_completion_tokens=None, seq_len=256, kv_cache_mib=128
)
"""For the tiny model and any other task."""

REASONING_TOKENS: Mapping[str, int] = {"arithmetic": 8, "gsm8k": 256}
"""Longest completion of a model that can reason."""
FUNCTION_TOKENS = 256
"""Longest completion for a reward function, if a pretrained model samples on a CPU. A class has a
limit of its own."""
REASONING_SEQ_LEN = 1152
"""Its longest sequence."""


def name_of_task(task: str) -> str:
    """`examples/my.py:reward` → `my`, `package.module:MyTask` → `module`."""
    source, _, attribute = task.partition(":")
    if source.endswith(".py"):
        return Path(source).stem
    return environment_name(attribute) if source in BRIDGES else source.rpartition(".")[2]


def is_function(task: str) -> bool:
    """`my.py:reward` or `agent`, and not `my.py:MyTask` or `verifiers:NAME`: a function has no
    limits."""
    if task == AGENT:
        return True
    source, _, attribute = task.partition(":")
    return source.endswith(".py") and not attribute[:1].isupper()


def sizes_for(
    tasks: Sequence[str],
    mode: Mode,
    *,
    is_tiny: bool,
    on_gpu: bool,
    given: Mapping[str, Any],
) -> RunSizes:
    """Defaults of the task with the longest sequences, replaced by what the user has given.

    Args:
        is_tiny: the model is the tiny one
        on_gpu: server and trainer use a GPU
        given: values by field of `RunSizes`
    """
    sizes = max((BY_TASK.get(task, OTHER_TASK) for task in tasks), key=lambda sizes: sizes.seq_len)
    if any(task not in BY_TASK for task in tasks):
        sizes = replace(sizes, max_completion_tokens=None)
    if not is_tiny:
        sizes = _for_a_pretrained_model(sizes, tasks)
    if on_gpu:
        sizes = replace(sizes, kv_cache_mib=None)
    elif not is_tiny and all(map(is_function, tasks)):
        sizes = replace(sizes, max_completion_tokens=FUNCTION_TOKENS)
    lora_factor = LORA_LR_FACTOR if is_tiny else PRETRAINED_LORA_LR_FACTOR
    sizes = replace(_for_the_mode(sizes, mode, lora_factor), **given)
    if "max_model_len" not in given:
        sizes = replace(sizes, max_model_len=max(sizes.max_model_len, sizes.seq_len))
    return sizes


SIZE_NAMES = tuple(field.name for field in fields(RunSizes))


def _for_a_pretrained_model(sizes: RunSizes, tasks: Sequence[str]) -> RunSizes:
    """A high learning rate would destroy its abilities, and each step takes longer."""
    if any(task != "arithmetic" for task in tasks):
        sizes = replace(sizes, seq_len=REASONING_SEQ_LEN, kv_cache_mib=256)
    if sizes.max_completion_tokens is not None:
        limit = max(REASONING_TOKENS[task] for task in tasks)
        sizes = replace(sizes, max_completion_tokens=limit)
    return replace(
        sizes,
        steps=min(sizes.steps, PRETRAINED_STEPS),
        batch_size=min(sizes.batch_size, PRETRAINED_BATCH),
        lr=OptimizerOptions.model_fields["lr"].default,
        lora_target_modules=LoraSettings.model_fields["lora_target_modules"].default,
        step_deadline_s=1800.0,
        server_deadline_s=1800.0,
        start_deadline_s=600.0,
    )


def _for_the_mode(sizes: RunSizes, mode: Mode, lora_factor: float) -> RunSizes:
    if mode.trains_adapter:
        sizes = replace(sizes, lr=lora_factor * sizes.lr)
    if not mode.restarts_engine:
        has_another = mode.shares_memory or mode.loads_adapters
        return replace(sizes, vllm_restart_interval=None if has_another else 1)
    return replace(
        sizes,
        steps=min(sizes.steps, STEPS_WITH_RESTARTS),
        step_deadline_s=sizes.step_deadline_s + RESTART_DEADLINE_S,
    )
