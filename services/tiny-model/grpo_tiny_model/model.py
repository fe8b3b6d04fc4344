"""Makes a model that is small enough to train on a laptop and real enough to learn.

The demo, the end-to-end tests and the benchmarks need a model in the ordinary format, on machines
without access to a model hub. This module makes one: Qwen2 architecture, about one million
parameters, a byte-level tokenizer with a ChatML template. Supervised training teaches it one-digit
sums until about a third of its answers are right. GRPO does the rest. A variant of it learns to
call a calculator; see `tool_use`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from grpo_core.weights.model_files import save_pretrained
from grpo_tiny_model.spec import TinySpec

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

log = structlog.get_logger()

MESSAGES_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PAD, BOS, EOS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
IGNORE_INDEX = -100
Examples = tuple["torch.Tensor", "torch.Tensor"]
"""Tokens and labels, [B, T] each."""


def ensure_tiny_model(directory: Path | None = None, spec: TinySpec | None = None) -> Path:
    """Return the tiny model's directory; creates the model on first use."""
    spec = spec or TinySpec()
    kind = "tiny-qwen2-tools" if spec.tools else "tiny-qwen2"
    target = directory or default_cache_directory() / f"{kind}-{spec.digest()}"
    return ensure_directory(target, lambda staging: make_tiny_model(staging, spec))


def ensure_directory(target: Path, make: Callable[[Path], None]) -> Path:
    """Return `target`; on first use, `make` fills a temporary directory, which is then renamed.

    Several processes may call it at once: the first one wins.
    """
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
        staging = Path(temporary, target.name)
        staging.mkdir()  # which others can read, too
        try:
            make(staging)
            staging.rename(target)
        except OSError:
            if not (target / "config.json").exists():
                raise
    return target


def default_cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "grpo"


def make_tiny_model(directory: Path, spec: TinySpec) -> None:
    """Train the model from random weights and save it with its tokenizer."""
    import torch

    from grpo_tiny_model import tool_use

    torch.manual_seed(spec.seed)
    tokenizer = build_tokenizer(tool_use.CHAT_TEMPLATE if spec.tools else MESSAGES_TEMPLATE)
    model = build_model(len(tokenizer), spec)
    teach = tool_use.teach_tool_use if spec.tools else teach_sums
    accuracy = teach(model, tokenizer, spec)
    save_pretrained(model, directory)
    tokenizer.save_pretrained(directory)
    log.info("model.created", directory=str(directory), accuracy=round(accuracy, 3))


def build_tokenizer(chat_template: str = MESSAGES_TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per byte plus three special tokens; no vocabulary file, no merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, BOS, EOS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def build_model(vocab_size: int, spec: TinySpec) -> PreTrainedModel:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=spec.width,
        intermediate_size=4 * spec.width,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        max_position_embeddings=spec.max_positions,
        tie_word_embeddings=spec.tie_word_embeddings,
        pad_token_id=vocab_size - 3,
        bos_token_id=vocab_size - 2,
        eos_token_id=vocab_size - 1,
    )
    return Qwen2ForCausalLM(config)


def teach_sums(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, spec: TinySpec) -> float:
    """Train on one-digit sums; returns the final accuracy, in [0, 1]."""
    import torch

    inputs, labels = sum_examples(tokenizer)  # [100, T] each

    def batch() -> Examples:
        rows = torch.randint(len(inputs), (spec.batch_size,))
        return inputs[rows], labels[rows]

    learner = Learner(model, spec.lr)
    return learner.teach("sums", batch, (inputs, labels), spec.max_steps, spec)


class Learner:
    """Supervised training of all parameters."""

    def __init__(self, model: PreTrainedModel, lr: float) -> None:
        import torch

        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)

    def learn(self, inputs: torch.Tensor, labels: torch.Tensor) -> float:
        """One step on [B, T] tokens and labels. Returns the mean loss per token, in nats."""
        import torch

        loss = self._model(inputs, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def teach(
        self,
        lesson: str,
        batch: Callable[[], Examples],
        evaluated: Examples,
        max_steps: int,
        spec: TinySpec,
    ) -> float:
        """Train until the accuracy of the spec is reached; returns that of the examples
        `evaluated`, in [0, 1]. Args: batch: draws the examples of a step"""
        accuracy = 0.0
        for step in range(1, max_steps + 1):
            self.learn(*batch())
            if step % spec.eval_every_steps == 0:
                accuracy = expected_accuracy(self._model, *evaluated)
                log.info("model.taught", lesson=lesson, step=step, accuracy=round(accuracy, 3))
                if accuracy >= spec.target_accuracy:
                    break
        return accuracy


def sum_examples(tokenizer: PreTrainedTokenizerFast) -> Examples:
    """All 100 sums as (input ids, labels), right-padded; labels are -100 outside the answer."""
    rows: list[tuple[list[int], list[int]]] = []
    for a, b in product(range(10), repeat=2):
        question = prompt_text(tokenizer, [{"role": "user", "content": f"{a}+{b}="}])
        prompt, answer = tokenizer.encode(question), tokenizer.encode(f"{a + b}{EOS}")
        rows.append((prompt + answer, [IGNORE_INDEX] * len(prompt) + answer))
    return padded(rows, tokenizer.pad_token_id)


def prompt_text(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, str]],
    tools: list[dict[str, object]] | None = None,
) -> str:
    text: str = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )
    return text


def padded(rows: Sequence[tuple[list[int], list[int]]], pad: int) -> Examples:
    """Rows of tokens and labels as (input ids, labels), [B, T] each, padded on the right."""
    import torch

    width = max(len(tokens) for tokens, _ in rows)
    inputs = [tokens + [pad] * (width - len(tokens)) for tokens, _ in rows]
    labels = [marks + [IGNORE_INDEX] * (width - len(marks)) for _, marks in rows]
    return torch.tensor(inputs), torch.tensor(labels)


def expected_accuracy(model: PreTrainedModel, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    """Mean over the rows of the probability that the model, sampled at temperature 1, says all
    their labels. Args: [B, T] each"""
    import torch

    with torch.no_grad():
        logp = model(inputs).logits[:, :-1].log_softmax(-1)  # [B, T-1, V]
    targets = labels[:, 1:]
    picked = logp.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return float((picked * (targets != IGNORE_INDEX)).sum(-1).exp().mean())
