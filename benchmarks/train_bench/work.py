"""The workloads: prompts of a task, and batches of completions of random tokens."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from grpo_trainer.advantages import group_std

GROUP_SIZE = 8


@dataclass(frozen=True)
class BatchFile:
    """One step's completions, as both sides read them. `model`: its directory."""

    model: str
    prompts: list[list[int]]  # of each completion
    completions: list[list[int]]
    scores: list[float]
    logprobs: list[list[float]]  # the model's, of each completion's tokens


def questions(task: str, count: int, data: Path | None, seed: int = 0) -> list[str]:
    """Args: data: GSM8K's directory, which only that task reads"""
    drawn = random.Random(seed)
    if task == "sums":
        return [f"{drawn.randint(0, 9)}+{drawn.randint(0, 9)}=" for _ in range(count)]
    assert data is not None
    lines = (data / "train.jsonl").read_text().splitlines()
    return [json.loads(line)["question"] for line in drawn.sample(lines, count)]


def answer(task: str, question: str) -> str:
    """The right answer; none for GSM8K, whose reward costs no time on either side."""
    return str(sum(map(int, question[:-1].split("+")))) if task == "sums" else "-"


def batch(
    model: Path, vocabulary: int, prompts: Sequence[list[int]], longest: int, group_size: int
) -> BatchFile:
    """Args: longest: of a completion; their lengths are log-normal, with a median of 0.6 of it"""
    drawn = random.Random(1)
    rows = [prompt for prompt in prompts for _ in range(group_size)]
    lengths = [
        min(longest, max(1, round(drawn.lognormvariate(math.log(longest * 0.6), 0.6))))
        for _ in rows
    ]
    completions = [[drawn.randrange(vocabulary) for _ in range(n)] for n in lengths]
    return BatchFile(
        model=str(model),
        prompts=rows,
        completions=completions,
        scores=[float(drawn.random() < 0.5) for _ in rows],
        logprobs=_logprobs(model, rows, completions),
    )


def advantages(drawn: BatchFile, group_size: int) -> list[float]:
    scores = torch.tensor(drawn.scores).view(-1, group_size)
    found: list[float] = torch.cat(group_std(list(scores))).tolist()
    return found


@torch.no_grad()
def _logprobs(
    directory: Path, prompts: list[list[int]], completions: list[list[int]]
) -> list[list[float]]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found = []
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = torch.tensor([prompt + completion])
        logits = model(tokens).logits[0, len(prompt) - 1 : -1]  # [T, V]
        chosen = torch.log_softmax(logits, -1).gather(-1, torch.tensor(completion)[:, None])
        found.append(chosen.squeeze(-1).tolist())
    return found


def prompt_tokens(tokenizer: Any, question: str) -> list[int]:
    found: list[int] = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    return found
