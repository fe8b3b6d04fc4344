"""Trains the tiny model with TRL, with each of some faults, by TRL's own interpreter:
`trl_side.py FILE`.

FILE is JSON with the model, the questions, the right answers and the names of the faults. Prints a
line of JSON for each fault: what TRL warned of, and the means of its metrics. A fault is an option
of GRPOConfig, a reward function, or a method of `Faulty` that replaces one of TRL's.
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
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

STEPS, GROUP, BATCH = 13, 8, 64
OPTIONS: dict[str, dict[str, Any]] = {
    "raw logprobs": {"temperature": 0.7},
    "top-p logprobs not renormalised": {"top_p": 0.8},
    "truncated answers scored as finished": {"max_completion_length": 2},
    "lost update in bfloat16": {"learning_rate": 1e-6},
    "reference that moves": {"beta": 0.05},
    "KL penalty with the wrong sign": {"beta": 0.05},
    "KL penalty left out": {"beta": 0.05},
    "clip bounds exchanged": {"epsilon": 0.2, "epsilon_high": 0.3, "num_iterations": 2},
    "ratio to itself": {"num_iterations": 2},
    "mean over each micro-batch": {"loss_type": "bnpo"},
}
"""Of GRPOConfig, by fault."""
ACCUMULATED = {
    "gradient of one micro-batch dropped",
    "loss divided again",
    "mean over each micro-batch",
}
"""In four micro-batches; the others in one."""


class Metrics(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        self.rows.append({k: v for k, v in logs.items() if isinstance(v, int | float)})


class Faulty(GRPOTrainer):  # type: ignore[misc]
    """Args: fault: its name"""

    beta: float
    epsilon_low: float
    epsilon_high: float
    temperature: float
    model_wrapped: Any

    def __init__(self, fault: str, **options: Any) -> None:
        super().__init__(**options)
        self.fault, self._calls = fault, 0
        self._first: dict[str, Any] = {}
        self.served: Any = None
        if fault == "wrong temperature":
            self.generation_config.temperature = 0.7
        if fault == "reference that moves":
            self.ref_model = self.model
        if fault == "KL penalty with the wrong sign":
            self.beta = -self.beta
        if fault == "clip bounds exchanged":
            self.epsilon_low, self.epsilon_high = self.epsilon_high, self.epsilon_low

    def _generate_single_turn(self, *arguments: Any, **options: Any) -> Any:
        if self.served is None:
            return super()._generate_single_turn(*arguments, **options)
        if self.fault == "one tensor not written":
            fresh = dict(self.model.named_parameters())
            with torch.no_grad():
                for name, parameter in self.served.named_parameters():
                    if "embed" not in name:
                        parameter.copy_(fresh[name])
        trained, self.model_wrapped = self.model_wrapped, self.served
        try:
            return super()._generate_single_turn(*arguments, **options)
        finally:
            self.model_wrapped = trained

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        found = super()._generate_and_score_completions(inputs)
        if self.fault == "duplicated batch":
            self._first = self._first or found
            return dict(self._first)
        change = CHANGES.get(self.fault)
        if change is not None:
            change(self, found)
        return found

    def logps(self, found: Any, temperature: float | None = None) -> Any:
        """[B, T] of the completions, by a plain forward pass."""
        ids = torch.cat([found["prompt_ids"], found["completion_ids"]], dim=1)
        mask = torch.cat([found["prompt_mask"], found["completion_mask"]], dim=1)
        with torch.no_grad():
            logits = self.model(input_ids=ids, attention_mask=mask).logits
        places = logits[:, -found["completion_ids"].size(1) - 1 : -1]
        logp = (places / (temperature or self.temperature)).log_softmax(-1)
        return logp.gather(-1, found["completion_ids"].unsqueeze(-1))[..., 0]

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        if self.fault == "ratio to itself":
            inputs = {k: v for k, v in inputs.items() if k != "old_per_token_logps"}
        loss = super()._compute_loss(model, inputs)
        self._calls += 1
        if self.fault == "gradient of one micro-batch dropped" and not self._calls % 4:
            return loss * 0
        if self.fault == "loss divided again":
            return loss / self.current_gradient_accumulation_steps
        return loss


def with_logps(change: Any) -> Any:
    def put(trainer: Faulty, found: Any) -> None:
        found["old_per_token_logps"] = change(trainer.logps(found))

    return put


def raw(trainer: Faulty, found: Any) -> None:
    found["old_per_token_logps"] = trainer.logps(found, temperature=1.0)


def shifted(logps: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.full_like(logps[:, :1], -0.5), logps[:, :-1]], dim=1)


def move_prompt(_: Faulty, found: Any) -> None:
    """The last six tokens of the prompt are part of the completion."""
    for kind in ("ids", "mask"):
        tail = found[f"prompt_{kind}"][:, -6:]
        found[f"prompt_{kind}"] = found[f"prompt_{kind}"][:, :-6]
        found[f"completion_{kind}"] = torch.cat([tail, found[f"completion_{kind}"]], dim=1)


def count_padding(_: Faulty, found: Any) -> None:
    found["completion_mask"] = torch.ones_like(found["completion_mask"])


def mask_end(trainer: Faulty, found: Any) -> None:
    ends = torch.isin(found["completion_ids"], torch.tensor(trainer.eos_token_ids))
    found["completion_mask"] = found["completion_mask"] * ~ends


def retokenise(_: Faulty, found: Any) -> None:
    found["completion_ids"][::3, 0] = (found["completion_ids"][::3, 0] + 1) % 250


def retokenise_one(_: Faulty, found: Any) -> None:
    found["completion_ids"][0, 0] = (found["completion_ids"][0, 0] + 1) % 250


def strip(_: Faulty, found: Any) -> None:
    for name in ("completion_ids", "completion_mask"):
        found[name] = found[name][:, 1:]


def change_prompt(place: int) -> Any:
    def put(_: Faulty, found: Any) -> None:
        found["prompt_ids"][:, place] = (found["prompt_ids"][:, place] + 1) % 250

    return put


def begin_twice(_: Faulty, found: Any) -> None:
    for name in ("prompt_ids", "prompt_mask"):
        found[name] = torch.cat([found[name][:, :1], found[name]], dim=1)


def drop_system(_: Faulty, found: Any) -> None:
    """Without the first turn, which begins with the prompt's first token."""
    row = found["prompt_ids"][0].tolist()
    second = row.index(row[0], 1)
    for name in ("prompt_ids", "prompt_mask"):
        found[name] = found[name][:, second:]


def repeat_group(_: Faulty, found: Any) -> None:
    for value in found.values():
        if value.ndim and len(value) == BATCH:
            value[GROUP : 2 * GROUP] = value[:GROUP]


def over_batch(trainer: Faulty, found: Any) -> None:
    scores = torch.tensor(trainer.reward_funcs[0].last)
    found["advantages"] = (scores - scores.mean()) / (scores.std() + 1e-4)


CHANGES: dict[str, Any] = {
    "shifted logprobs": with_logps(shifted),
    "logprobs of another unit": with_logps(lambda logps: 0.8 * logps),
    "logprobs rounded to bfloat16": with_logps(lambda logps: logps.bfloat16().float()),
    "logprobs of four digits": with_logps(lambda logps: logps.round(decimals=4)),
    "raw logprobs": raw,
    "prompt trained on": move_prompt,
    "padding counted": count_padding,
    "end token masked": mask_end,
    "retokenised text": retokenise,
    "one token retokenised": retokenise_one,
    "answer stripped": strip,
    "another prompt": change_prompt(5),
    "another chat template": change_prompt(-1),
    "prompt begun twice": begin_twice,
    "system prompt dropped": drop_system,
    "group sent twice under two keys": repeat_group,
    "advantages over the batch": over_batch,
    "KL penalty left out": lambda trainer, _: setattr(trainer, "beta", 0.0),
}
"""What is done to the result of `_generate_and_score_completions`."""


class Reward:
    __name__ = "reward"

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self.last: list[float] = []

    def __call__(self, completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        said = [completion[0]["content"].strip() for completion in completions]
        scores = [float(text == right) for text, right in zip(said, answer, strict=True)]
        self.last = scores
        if self._fault == "NaN reward as 0":
            draws = torch.rand(len(scores), generator=torch.Generator().manual_seed(len(said)))
            return [float("nan") if d < 0.3 else s for s, d in zip(scores, draws, strict=True)]
        groups = [scores[i : i + GROUP] for i in range(0, len(scores), GROUP)]
        if self._fault == "reward broadcast over a group":
            return [statistics.fmean(group) for group in groups for _ in group]
        if self._fault == "scores in another order":
            return [score for group in groups for score in (*group[1:], group[0])]
        return scores


def train(work: dict[str, Any], fault: str, directory: str) -> dict[str, Any]:
    parts = 4 if fault in ACCUMULATED else 1
    usual = {"learning_rate": 3e-4, "max_completion_length": 8}
    config = GRPOConfig(
        output_dir=directory,
        per_device_train_batch_size=BATCH // parts,
        gradient_accumulation_steps=parts,
        num_generations=GROUP,
        max_steps=STEPS,
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        **usual | OPTIONS.get(fault, {}),
    )
    dtype = torch.bfloat16 if fault == "lost update in bfloat16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=dtype)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    metrics = Metrics()
    system = [{"role": "system", "content": "Add."}] if fault == "system prompt dropped" else []
    rows = [
        {"prompt": [*system, {"role": "user", "content": question}], "answer": answer}
        for question, answer in zip(work["questions"], work["answers"], strict=True)
    ]
    with_dropout = fault == "dropout on in the check"
    trainer = Faulty(
        fault,
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        reward_funcs=Reward(fault),
        processing_class=AutoTokenizer.from_pretrained(work["model"]),
        callbacks=[metrics],
        peft_config=LoraConfig(lora_dropout=0.2, task_type="CAUSAL_LM") if with_dropout else None,
    )
    if fault == "update not written":
        step_once(trainer)
    if fault in ("stale weights", "one tensor not written"):
        # Not a copy of `model`: TRL has replaced its forward pass.
        trainer.served = AutoModelForCausalLM.from_pretrained(work["model"], dtype=dtype)
    trainer.train()
    names = {name for row in metrics.rows for name in row}
    means = {
        name: statistics.fmean(row[name] for row in metrics.rows if name in row) for name in names
    }
    if not with_dropout:
        changed = sum(int((p != b).sum()) for p, b in zip(model.parameters(), before, strict=True))
        means["changed weights"] = changed / sum(b.numel() for b in before)
    return means


def step_once(trainer: Faulty) -> None:
    """Later updates are lost."""
    create = trainer.create_optimizer

    def created(*arguments: Any) -> Any:
        optimizer = create(*arguments)
        right, calls = optimizer.step, list[None]()

        def step(*given: Any, **options: Any) -> Any:
            calls.append(None)
            return right(*given, **options) if len(calls) == 1 else None

        optimizer.step = step
        return optimizer

    trainer.create_optimizer = created


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def run(work: dict[str, Any], fault: str, handler: Kept) -> dict[str, Any]:
    torch.manual_seed(0)
    handler.messages.clear()
    error = None
    with warnings.catch_warnings(record=True) as caught, tempfile.TemporaryDirectory() as directory:
        warnings.simplefilter("always")
        try:
            metrics = train(work, fault, directory)
        except Exception as problem:  # noqa: BLE001
            metrics, error = {}, f"{type(problem).__name__}: {problem}"
    told = [*handler.messages, *(str(warning.message) for warning in caught)]
    return {"fault": fault, "told": list(dict.fromkeys(told)), "error": error, "metrics": metrics}


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    handler = Kept()
    for name in ("", "trl", "transformers", "accelerate"):
        logging.getLogger(name).addHandler(handler)
    for fault in work["faults"]:
        sys.stdout.write(json.dumps(run(work, fault, handler)) + "\n")
        sys.stdout.flush()


main()
