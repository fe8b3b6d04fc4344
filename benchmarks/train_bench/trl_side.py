"""TRL's side, run by its own interpreter: `trl_side.py loop|step FILE`. Prints one line of JSON.

`loop` trains with GRPOTrainer; `step` times its loss, backward pass and optimizer on one batch.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from timed_steps import timed_steps  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

WARM_STEPS = 3


class StepTimes(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


def trainer(work: dict[str, Any], rows: list[dict[str, Any]], times: StepTimes) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    config = GRPOConfig(
        output_dir=work["directory"],
        per_device_train_batch_size=work["micro_batch"],
        gradient_accumulation_steps=work["sequences"] // work["micro_batch"],
        num_generations=8,
        max_completion_length=work["longest"],
        loss_type="grpo",
        beta=0.0,
        epsilon=0.2,
        max_steps=work["steps"],
        learning_rate=1e-5,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32)
    return GRPOTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        reward_funcs=length_reward if work.get("reward") == "length" else reward,
        processing_class=tokenizer,
        callbacks=[times],
        peft_config=adapter() if work.get("lora") else None,
    )


def adapter() -> Any:
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"]
    )


def length_reward(completions: list[Any], **_: Any) -> list[float]:
    """That of `length_reward.py`."""
    return [len(completion[0]["content"]) % 8 / 8 for completion in completions]


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    said = (completion[0]["content"].strip() for completion in completions)
    return [float(text == right) for text, right in zip(said, answer, strict=True)]


def loop(work: dict[str, Any]) -> dict[str, Any]:
    rows = [
        {"prompt": [{"role": "user", "content": question}], "answer": answer}
        for question, answer in zip(work["questions"], work["answers"], strict=True)
    ]
    times = StepTimes()
    trainer(work, rows, times).train()
    steps = [b - a for a, b in zip(times.ends, times.ends[1:], strict=False)][WARM_STEPS:]
    return {"step_s": statistics.median(steps)}


def step(work: dict[str, Any]) -> dict[str, Any]:
    """Micro-batches of the given number of rows, each padded on its own."""
    rows = [{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}] * 8
    grpo = trainer(work, rows, StepTimes())
    grpo.current_gradient_accumulation_steps = work["sequences"] // work["micro_batch"]
    model = grpo.model.train()
    parts = [
        inputs(work, start, start + work["micro_batch"])
        for start in range(0, work["sequences"], work["micro_batch"])
    ]
    losses = [partial(grpo._compute_loss, model, part) for part in parts]
    found: dict[str, Any] = timed_steps(model, losses, work["steps"])
    return found


def inputs(work: dict[str, Any], start: int, end: int) -> dict[str, torch.Tensor]:
    """Prompts padded on the left, completions on the right, as `GRPOTrainer` does."""
    prompts, completions = work["prompts"][start:end], work["completions"][start:end]
    wide, long = max(map(len, prompts)), max(map(len, completions))
    padded = [[0] * (wide - len(p)) + p for p in prompts]
    mask = [[0] * (wide - len(p)) + [1] * len(p) for p in prompts]
    return {
        "prompt_ids": torch.tensor(padded),
        "prompt_mask": torch.tensor(mask),
        "completion_ids": torch.tensor([c + [0] * (long - len(c)) for c in completions]),
        "completion_mask": torch.tensor(
            [[1] * len(c) + [0] * (long - len(c)) for c in completions]
        ),
        "advantages": torch.tensor(work["advantages"][start:end]),
        "old_per_token_logps": torch.tensor(
            [logp + [0.0] * (long - len(logp)) for logp in work["logprobs"][start:end]]
        ),
        "num_items_in_batch": torch.tensor(sum(map(len, work["completions"]))),
    }


def main() -> None:
    work = json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(work["threads"])
    found = loop(work) if sys.argv[1] == "loop" else step(work)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
