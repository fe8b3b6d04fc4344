"""Trains the tiny model with TRL and one fault, by TRL's own interpreter: `trl_side.py FILE`.

FILE is JSON with the model, the questions, the right answers and the fault's name. Prints one line
of JSON: what TRL warned of, and the means of its metrics.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

STEPS, GROUP = 13, 8


class Metrics(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        self.rows.append({k: v for k, v in logs.items() if isinstance(v, int | float)})


def reward_of(fault: str) -> Any:
    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        said = [completion[0]["content"].strip() for completion in completions]
        scores = [float(text == right) for text, right in zip(said, answer, strict=True)]
        if fault == "NaN reward as 0":
            draws = torch.rand(len(scores), generator=torch.Generator().manual_seed(len(said)))
            return [float("nan") if d < 0.3 else s for s, d in zip(scores, draws, strict=True)]
        if fault == "reward broadcast over a group":
            groups = [scores[i : i + GROUP] for i in range(0, len(scores), GROUP)]
            return [statistics.fmean(group) for group in groups for _ in group]
        return scores

    return reward


def train(work: dict[str, Any], directory: str) -> dict[str, Any]:
    fault: str = work["fault"]
    is_lost = fault == "lost update in bfloat16"
    config = GRPOConfig(
        output_dir=directory,
        per_device_train_batch_size=64,
        num_generations=GROUP,
        max_completion_length=2 if fault.startswith("truncated") else 8,
        top_p=0.8 if fault.startswith("top-p") else 1.0,
        max_steps=STEPS,
        learning_rate=1e-6 if is_lost else 3e-4,
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    dtype = torch.bfloat16 if is_lost else torch.float32
    model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=dtype)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    metrics = Metrics()
    rows = [
        {"prompt": [{"role": "user", "content": question}], "answer": answer}
        for question, answer in zip(work["questions"], work["answers"], strict=True)
    ]
    GRPOTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        reward_funcs=reward_of(fault),
        processing_class=AutoTokenizer.from_pretrained(work["model"]),
        callbacks=[metrics],
    ).train()
    changed = sum(int((p != b).sum()) for p, b in zip(model.parameters(), before, strict=True))
    names = {name for row in metrics.rows for name in row}
    means = {
        name: statistics.fmean(row[name] for row in metrics.rows if name in row) for name in names
    }
    return means | {"changed weights": changed / sum(b.numel() for b in before)}


class Kept(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(2)
    torch.manual_seed(0)
    told: list[str] = []
    handler = Kept(told)
    for name in ("", "trl", "transformers", "accelerate"):
        logging.getLogger(name).addHandler(handler)
    error = None
    with warnings.catch_warnings(record=True) as caught, tempfile.TemporaryDirectory() as directory:
        warnings.simplefilter("always")
        try:
            metrics = train(work, directory)
        except Exception as problem:  # noqa: BLE001
            metrics, error = {}, f"{type(problem).__name__}: {problem}"
    told += [str(warning.message) for warning in caught]
    found = {"told": list(dict.fromkeys(told)), "error": error, "metrics": metrics}
    sys.stdout.write(json.dumps(found) + "\n")


main()
