"""Trains the model with TRL's SFTTrainer, and writes the result."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from grpo_core.tree.weights import LoraOptions
from grpo_core.weights.model_files import load_tokenizer
from grpo_runs.settings.sft import SftSettings
from grpo_runs.sft.examples import NOT_LEARNED, TokenisedExample
from grpo_runs.sft.saving import save_like
from grpo_trainer.errors import NonFiniteLoss
from grpo_trainer.model.adapter import ALL_LINEAR, with_adapter
from grpo_trainer.model.loading import device_to_load_on, import_architecture
from grpo_trainer.model.policy import CausalLM, device_of, require_known

MEASURED_EXAMPLES = 64
"""Their loss is measured before and after."""

Progress = Callable[[int, int, float], object]
"""Called with a step, the number of steps, and the loss of the step."""


@dataclass(frozen=True)
class SftResult:
    """Args:
    loss_before, loss_after: mean per learned token of the measured examples, in nats, of the
        model and of the result as it is saved
    tokens: of all steps, prompts included
    """

    examples: int
    measured_examples: int
    loss_before: float
    loss_after: float
    steps: int
    tokens: int
    seconds: float


def train_and_save(
    settings: SftSettings,
    model: str,
    examples: Sequence[TokenisedExample],
    metrics_file: Path,
    target: Path,
    progress: Progress,
) -> SftResult:
    """Args:
        model: a directory, or an id on the hub
        metrics_file: gets a line for each step
        target: directory of the result, which does not exist yet

    Raises:
        NonFiniteLoss: training diverges; nothing is saved.
        NoSuchDevice, UnsupportedModel, UnusableWeights, PolicyMismatch: `--device` or `--model`
            cannot be used.
        OSError: a file could not be written.
    """
    began = time.monotonic()
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    device = device_to_load_on(settings.device.partition(":")[0])  # of the one visible GPU
    policy = _loaded(model, device)
    require_known((token for one in examples for token in one.token_ids), policy)
    count = min(MEASURED_EXAMPLES, len(examples))
    measured = random.Random(settings.seed).sample(examples, count)
    before = mean_loss(policy, measured)
    recorder = _Recorder(metrics_file, progress)
    trained = _trained(policy, settings, model, examples, recorder)
    save_like(model, trained, target, settings.seed)
    del policy, trained  # a GPU may have no room for both
    return SftResult(
        examples=len(examples),
        measured_examples=count,
        loss_before=before,
        loss_after=mean_loss(_loaded(str(target), device), measured),
        steps=recorder.steps,
        tokens=recorder.tokens,
        seconds=time.monotonic() - began,
    )


def _loaded(model: str, device: torch.device) -> CausalLM:
    """In float32: small updates of bfloat16 weights would be lost."""
    import_architecture(model)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy: CausalLM = loaded.to(device)
    return policy


@torch.no_grad()
def mean_loss(policy: CausalLM, examples: Sequence[TokenisedExample]) -> float:
    """Mean over the learned tokens, in nats."""
    policy.eval()
    total, tokens = 0.0, 0
    for example in examples:
        inputs = torch.tensor([example.token_ids], device=device_of(policy))  # [1, T]
        labels = torch.tensor(example.labels[1:], device=device_of(policy))  # [T-1]
        logits = policy(input_ids=inputs, use_cache=False).logits[0, :-1]  # [T-1, V]
        total += float(cross_entropy(logits, labels, ignore_index=NOT_LEARNED, reduction="sum"))
        tokens += int((labels != NOT_LEARNED).sum())
    return total / tokens


def _trained(
    policy: CausalLM,
    settings: SftSettings,
    model: str,
    examples: Sequence[TokenisedExample],
    recorder: _Recorder,
) -> CausalLM:
    """The whole model after training: an adapter is merged into it."""
    on_gpu = device_of(policy).type == "cuda"
    config = SFTConfig(
        output_dir=str(recorder.file.parent),
        num_train_epochs=settings.epochs,
        learning_rate=settings.lr,
        per_device_train_batch_size=settings.batch_size,
        gradient_checkpointing=settings.gradient_checkpointing,
        max_length=None,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        seed=settings.seed,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
    )
    torch.manual_seed(settings.seed)  # of the adapter
    if r := settings.lora_r:
        lora = LoraOptions(r=r, alpha=2 * r, dropout=0.0, target_modules=(ALL_LINEAR,), layers=None)
        policy = with_adapter(policy, lora)
    rows = [{"input_ids": one.token_ids, "labels": one.labels} for one in examples]
    trainer = SFTTrainer(
        model=policy,
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=load_tokenizer(model, transformers),
        callbacks=[recorder],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    trained: Any = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    whole: CausalLM = trained.merge_and_unload() if settings.lora_r else trained
    return whole


class _Recorder(transformers.TrainerCallback):  # type: ignore[misc]
    """Writes the metrics of each step, under the names of a run."""

    def __init__(self, file: Path, progress: Progress) -> None:
        self.file = file
        self.steps = self.tokens = 0
        self._progress = progress
        self._since = 0.0

    def on_step_begin(self, *_: object, **__: object) -> None:
        self._since = time.monotonic()

    def on_log(
        self, _: object, state: Any, __: object, logs: Mapping[str, float], **___: object
    ) -> None:
        """Raises `NonFiniteLoss`."""
        if "loss" not in logs:
            return  # the summary at the end
        loss, seconds = logs["loss"], time.monotonic() - self._since
        if not math.isfinite(loss):
            raise NonFiniteLoss(
                f"the loss of step {state.global_step} is {loss}; lower --lr, or check the data"
            )
        tokens = int(logs["num_tokens"])
        record = {
            "step": state.global_step,
            "steps": state.max_steps,
            "train/loss": loss,
            "train/lr": logs["learning_rate"],
            "train/grad_norm": logs["grad_norm"],
            "train/step_time": seconds,
            "train/compute_time": seconds,
            "policy/entropy": logs["entropy"],
            "throughput/tokens_per_s": (tokens - self.tokens) / seconds,
        }
        with self.file.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.steps, self.tokens = state.global_step, tokens
        self._progress(state.global_step, state.max_steps, loss)
