"""The faults: how each is injected, and the words by which the trainer must name it.

A fault of the environment begins with its fourth batch. A fault of the trainer's code is there from
the start.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from grpo_core.wire.fields import MASKED, PROMPT_LOGPROB
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer import learner
from grpo_trainer.checks.causes import Cause
from grpo_trainer.checks.findings import CheckName
from grpo_trainer.losses import LossParts
from grpo_trainer.model import loading
from grpo_trainer.model.reference import Reference
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.optim.master_update import MasterUpdate
from grpo_trainer.weight_sync import build as build_module
from grpo_trainer.weight_sync.shared import SharedVllm
from tests.silent_faults.exercise import TokenIds
from tests.silent_faults.producer import Change, unchanged

SHARED, LORA = "shared_vllm", "lora_only"
Sabotage = Callable[[pytest.MonkeyPatch], None]


def nothing(_: pytest.MonkeyPatch) -> None:
    """Leave the trainer as it is."""


@dataclass(frozen=True)
class Fault:
    """Args:
    injected: what is done, for the table
    named: an error or a warning must contain one of these words
    change, producer: the faulty environment
    options, sabotage: the faulty trainer
    """

    injected: str
    named: tuple[str, ...]
    change: Change = unchanged
    producer: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    sabotage: Sabotage = nothing
    mode: str = SHARED

    @property
    def is_of_environment(self) -> bool:
        return self.change is not unchanged or bool(self.producer)


def changed(group: ScoredGroup, **changes: Any) -> ScoredGroup:
    return ScoredGroup.model_validate(group.model_dump() | changes)


def prompt_length(group: ScoredGroup) -> int:
    return group.masks[0].index(next(mask for mask in group.masks[0] if mask != MASKED))


def with_logprobs(group: ScoredGroup, change: Callable[[list[float]], list[float]]) -> ScoredGroup:
    """Args: change: of the logprobs of one completion"""
    p = prompt_length(group)
    rows = [[*row[:p], *change(row[p:])] for row in group.inference_logprobs or []]
    return changed(group, inference_logprobs=rows)


def late(group: ScoredGroup, _: TokenIds) -> ScoredGroup:
    """The first sampled token gets a plausible logprob, every other token that of its left
    neighbour."""
    return with_logprobs(group, lambda row: [-0.5, *row[:-1]])


def scaled(group: ScoredGroup, _: TokenIds) -> ScoredGroup:
    return with_logprobs(group, lambda row: [0.8 * value for value in row])


def prompt_trained(group: ScoredGroup, _: TokenIds) -> ScoredGroup:
    """From the seventh token on, with a plausible logprob."""
    p, rows = prompt_length(group), group.inference_logprobs or []
    return changed(
        group,
        masks=[[MASKED] * 6 + tokens[6:] for tokens in group.tokens],
        inference_logprobs=[[*row[:6], *[-0.5] * (p - 6), *row[p:]] for row in rows],
    )


def failed_as_zero(group: ScoredGroup, _: TokenIds) -> ScoredGroup:
    draw = random.Random(str(group.tokens))
    return changed(group, scores=[0.0 if draw.random() < 0.3 else s for s in group.scores])


def broadcast(group: ScoredGroup, _: TokenIds) -> ScoredGroup:
    return changed(group, scores=[fmean(group.scores)] * group.size)


def padded(group: ScoredGroup, ids: TokenIds) -> ScoredGroup:
    """To one length, with the padding in the masks."""
    longest = max(map(len, group.tokens)) + 1
    spare = [longest - len(tokens) for tokens in group.tokens]
    pairs = list(zip(group.tokens, group.masks, group.inference_logprobs or [], spare, strict=True))
    return changed(
        group,
        tokens=[tokens + [ids.pad] * n for tokens, _, _, n in pairs],
        masks=[masks + [ids.pad] * n for _, masks, _, n in pairs],
        inference_logprobs=[row + [-0.5] * n for _, _, row, n in pairs],
    )


def retokenised(group: ScoredGroup, ids: TokenIds) -> ScoredGroup:
    """A third of the completions begins with another token id than the sampled one."""
    p, draw = prompt_length(group), random.Random(str(group.tokens))
    tokens = [list(row) for row in group.tokens]
    for row in tokens:
        if draw.random() < 1 / 3:
            row[p] = ids.other(row[p])
    return changed(group, tokens=tokens, masks=[[MASKED] * p + row[p:] for row in tokens])


def another_prompt(group: ScoredGroup, ids: TokenIds) -> ScoredGroup:
    """The question's first summand is another one, as after a mistake in the order of items."""
    prompt = group.tokens[0][: prompt_length(group)]
    digit = [i for i, token in enumerate(prompt) if token in ids.digits][-2]
    tokens = [list(row) for row in group.tokens]
    for row in tokens:
        row[digit] = ids.other_digit(row[digit])
    return changed(group, tokens=tokens)


def rounded(group: ScoredGroup, _: TokenIds) -> ScoredGroup:
    return with_logprobs(group, lambda row: torch.tensor(row).bfloat16().tolist())


def begun_twice(group: ScoredGroup, _: TokenIds) -> ScoredGroup:
    """As after encoding a chat with its beginning by a tokenizer that adds a beginning."""
    return changed(
        group,
        tokens=[[row[0], *row] for row in group.tokens],
        masks=[[MASKED, *row] for row in group.masks],
        inference_logprobs=[[PROMPT_LOGPROB, *row] for row in group.inference_logprobs or []],
    )


def another_template(group: ScoredGroup, ids: TokenIds) -> ScoredGroup:
    """The newline after the question's role is a space."""
    prompt = group.tokens[0][: prompt_length(group)]
    newline = [i for i, token in enumerate(prompt) if token == ids.newline][-3]
    rows = [[*row[:newline], ids.space, *row[newline + 1 :]] for row in group.tokens]
    return changed(group, tokens=rows)


def one_retokenised(group: ScoredGroup, ids: TokenIds) -> ScoredGroup:
    """One token in the middle of the longest completion is another one."""
    tokens, masks = [list(row) for row in group.tokens], [list(row) for row in group.masks]
    longest = max(range(group.size), key=lambda i: len(tokens[i]))
    p = prompt_length(group)
    middle = p + (len(tokens[longest]) - p) // 2 - 1
    tokens[longest][middle] = masks[longest][middle] = ids.other(tokens[longest][middle])
    return changed(group, tokens=tokens, masks=masks)


def version_ahead(group: ScoredGroup, _: TokenIds) -> ScoredGroup:
    overrides = copy.deepcopy(group.group_overrides or {})
    overrides["policy_version"] = [
        [[epoch, step + 1] for epoch, step in pair] for pair in overrides["policy_version"]
    ]
    return changed(group, group_overrides=overrides)


def end_masked(group: ScoredGroup, ids: TokenIds) -> ScoredGroup:
    rows = zip(group.tokens, group.masks, strict=True)
    return changed(group, masks=[[*m[:-1], MASKED] if t[-1] == ids.end else m for t, m in rows])


class PrivateCopy(SharedVllm):
    """Trains a copy, so that updates are announced but never reach the server."""

    def load_policy(self, restoring: bool = False) -> Any:
        return copy.deepcopy(super().load_policy(restoring))


def train_a_copy(patch: pytest.MonkeyPatch) -> None:
    build = build_module.build_weight_sync

    def build_copy(*arguments: Any) -> Any:
        sync = build(*arguments)
        sync.__class__ = PrivateCopy  # type: ignore[assignment]
        return sync

    patch.setattr(build_module, "build_weight_sync", build_copy)


def write_only_once(patch: pytest.MonkeyPatch) -> None:
    """Write only the first update. Server and trainer read the same memory, so they agree."""
    write, written = MasterOptimizer.write_into_parameters, []

    def forgetful(optimizer: MasterOptimizer, *may_write: Any) -> None:
        if not written:
            write(optimizer, *may_write)
        written.append(None)

    patch.setattr(MasterOptimizer, "write_into_parameters", forgetful)


def rounded_to_bfloat16(patch: pytest.MonkeyPatch) -> None:
    right = MasterUpdate.step

    def rounding(self: MasterUpdate, part: Any, *others: Any) -> None:
        right(self, part, *others)
        part.master.copy_(part.master.bfloat16())

    patch.setattr(MasterUpdate, "step", rounding)


def dropout_in_the_check(patch: pytest.MonkeyPatch) -> None:
    """The pass that is compared with the server is the one with dropout."""
    find = learner.adapter_dropouts

    def switch_on(policy: Any) -> list[Any]:
        for module in find(policy):
            module.train()
        return []

    patch.setattr(learner, "adapter_dropouts", switch_on)


def reference_is_policy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        learner, "build_reference", lambda policy, forward, _: Reference(policy, forward, False)
    )


def micro_batch_dropped(patch: pytest.MonkeyPatch) -> None:
    """Every fourth micro-batch gives no gradient."""
    right, calls = learner.step_loss, []

    def dropping(*arguments: Any) -> LossParts:
        calls.append(None)
        return LossParts(*(part * bool(len(calls) % 4) for part in right(*arguments)))

    patch.setattr(learner, "step_loss", dropping)


def adapter_scaled(patch: pytest.MonkeyPatch) -> None:
    right = loading.write_adapter

    def doubled(policy: Any, directory: Path) -> None:
        right(policy, directory)
        file = directory / "adapter_config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps(config | {"lora_alpha": 2 * config["lora_alpha"]}))

    patch.setattr(loading, "write_adapter", doubled)


TOKENS = (Cause.OTHER_TOKENS, CheckName.OTHER_TOKENS, CheckName.IMPORTANCE_RATIO)
UNPACED = {"paced": False}
"""No step is taken on such groups."""
PENALTY = {"kl_coef": 0.05}
FAULTS = {
    "shifted logprobs": Fault(
        "each token gets the logprob of its left neighbour", (Cause.LOGPROBS_LATE,), change=late
    ),
    "prompt trained on": Fault(
        "the masks begin within the prompt",
        ("prompt_trained_on", Cause.PROMPT_TRAINED),
        change=prompt_trained,
        producer=UNPACED,
    ),
    "NaN reward as 0": Fault(
        "30 % of the rewards are NaN, which the environment sends as 0",
        (CheckName.INCONSISTENT_SCORES,),
        change=failed_as_zero,
    ),
    "stale weights": Fault(
        "updates never reach the server",
        (Cause.STALE_WEIGHTS, "does not serve the trainer's weights"),
        sabotage=train_a_copy,
    ),
    "wrong temperature": Fault(
        "sampled at 0.7, stated as 1",
        (Cause.TEMPERATURE, "'temperature'"),
        producer={"sampling": {"temperature": 0.7}},
    ),
    "padding counted": Fault(
        "padding after the end token is in the masks",
        ("trained_after_end_token",),
        change=padded,
        producer=UNPACED,
    ),
    "duplicated batch": Fault(
        "run-api hands out the first batch again",
        ("were already in the batch of step 0",),
        producer={"repeats_after": 3},
    ),
    "lost update in bfloat16": Fault(
        "master weights are rounded to bfloat16 after each step",
        (CheckName.LOST_UPDATE,),
        options={"lr": 3e-5},
        sabotage=rounded_to_bfloat16,
    ),
    "truncated answers scored as finished": Fault(
        "completions stop before the end token, and text without an end token gets full marks",
        (CheckName.UNFINISHED_SCORED,),
        producer={"cuts_off": True},
    ),
    "reward broadcast over a group": Fault(
        "each completion gets the mean score of its group",
        (CheckName.EQUAL_SCORES,),
        change=broadcast,
    ),
    "retokenised text": Fault(
        "a third of the completions have another token id than the sampled one",
        TOKENS,
        change=retokenised,
    ),
    "wrong adapter scale": Fault(
        "the published adapter states twice its lora_alpha",
        ("lora_alpha",),
        sabotage=adapter_scaled,
        mode=LORA,
    ),
    "dropout on in the check": Fault(
        "the pass compared with the server has dropout",
        ("dropout is on", Cause.TRAINING_PASS),
        options={"lora_dropout": 0.2},
        sabotage=dropout_in_the_check,
        mode=LORA,
    ),
    "top-p logprobs not renormalised": Fault(
        "sampled with top_p 0.8, with the logprobs of the whole distribution",
        (CheckName.TRUNCATED_SAMPLING,),
        producer={"sampling": {"top_p": 0.8}, "rescores": True},
    ),
    "reference that moves": Fault(
        "the reference model is the policy itself",
        (CheckName.REFERENCE_MOVED,),
        options=PENALTY,
        sabotage=reference_is_policy,
    ),
    "gradient of one micro-batch dropped": Fault(
        "every fourth micro-batch gives no gradient",
        ("a micro-batch is left out",),
        sabotage=micro_batch_dropped,
    ),
    "off-by-one version": Fault(
        "groups state the version after the one that sampled them",
        (CheckName.VERSION_AHEAD,),
        change=version_ahead,
    ),
    "end token masked": Fault(
        "the mask of each end token is -100", (CheckName.END_TOKEN_MASKED,), change=end_masked
    ),
}
ALSO = {
    "logprobs of another unit": Fault(
        "logprobs times 0.8", (Cause.SCALED, CheckName.IMPORTANCE_RATIO), change=scaled
    ),
    "group sent twice under two keys": Fault(
        "each batch contains a group twice",
        ("trained_groups.received_again",),
        producer={"sends_twice": True},
    ),
    "another prompt": Fault(
        "the prompt that is sent is not the one that was sampled from",
        TOKENS,
        change=another_prompt,
    ),
    "logprobs rounded to bfloat16": Fault(
        "each logprob is rounded to bfloat16",
        (Cause.ROUNDED, "rounding to bfloat16"),
        change=rounded,
    ),
    "prompt begun twice": Fault(
        "the first token of the prompt is sent twice", TOKENS, change=begun_twice
    ),
    "another chat template": Fault(
        "the newline after the question's role is sent as a space", TOKENS, change=another_template
    ),
    "one token retokenised": Fault(
        "in one completion of each batch, one token is another id than the sampled one",
        (*TOKENS, CheckName.SINGLE_TOKENS),
        change=one_retokenised,
        producer={"changes_one": True},
    ),
    "update not written": Fault(
        "only the first update is written into the shared memory",
        ("differ from the optimizer's result",),
        sabotage=write_only_once,
    ),
}
