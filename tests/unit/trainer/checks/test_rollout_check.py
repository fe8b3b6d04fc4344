"""Faulty data of an environment is named on the first batch that shows it.

Completions are sampled from a small random model, with its own logprobs; then one thing is broken.
`tests/silent_faults` does the same with a real server, which may also serve other
weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from grpo_core.errors import ServiceUnavailable
from grpo_core.tree.objectives import GRPO
from grpo_core.wire.fields import MASKED, PROMPT_LOGPROB
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.checks.causes import Cause
from grpo_trainer.checks.evidence import Movement
from grpo_trainer.checks.findings import Finding
from grpo_trainer.checks.rollouts import (
    SINGLE_TOKEN_FACTOR,
    RolloutCheck,
    ServedLogprobs,
    groups_with_unlikely_prefix,
    single_tokens,
)
from grpo_trainer.errors import RolloutMismatch
from grpo_trainer.learner import accumulate_gradients
from grpo_trainer.model.logprobs import token_values
from grpo_trainer.token_table import TokenTable
from tests.unit.trainer.forward_rig import qwen
from tests.unit.trainer.groups import collated, group, usable

HELD, OLDER = PolicyVersion(2, 8), PolicyVersion(2, 7)
TOLERANCE = 1e-3
SIZE, LENGTH, PROMPT = 4, 6, 5
PROMPTS = ([3, 14, 15, 9, 2], [6, 5, 35, 8, 9], [7, 9, 3, 2, 38])
Fault = Callable[[ScoredGroup], ScoredGroup]


@pytest.fixture(scope="module")
def policy() -> Any:
    """A model whose logprobs differ between tokens, and whose completions differ."""
    return qwen(tie_word_embeddings=False, initializer_range=0.15)


def logprobs(policy: Any, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
    """[T] → [T-1]"""
    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        logp = token_values(policy, ids[:, :-1], ids[:, 1:], torch.tensor([temperature])).logp
    values: list[float] = logp[0].tolist()
    return values


@dataclass
class Sampler:
    """A group. `drift`: standard deviation of noise on the logprobs, like that of older weights."""

    policy: Any
    temperature: float = 1.0
    version: PolicyVersion | None = HELD
    drift: float = 0.0
    says: dict[str, Any] = field(default_factory=dict)
    env_id: int | None = 0
    fault: Fault = lambda group: group
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    def groups(self) -> list[ScoredGroup]:
        return [self.fault(self._group(prompt)) for prompt in PROMPTS]

    def _group(self, prompt: list[int]) -> ScoredGroup:
        rows = self._complete(prompt)
        versions = [[self.version, self.version]] * SIZE if self.version else []
        return ScoredGroup(
            tokens=rows,
            masks=[[MASKED] * PROMPT + row[PROMPT:] for row in rows],
            scores=[float(i) for i in range(SIZE)],
            inference_logprobs=[[PROMPT_LOGPROB] * PROMPT + self._logged(row) for row in rows],
            generation_params=self.says,
            group_overrides={"policy_version": versions},
            env_id=self.env_id,
        )

    @torch.no_grad()
    def _complete(self, prompt: list[int]) -> list[list[int]]:
        tokens = torch.tensor([prompt] * SIZE)
        for _ in range(LENGTH):
            logits = self.policy(tokens).logits[:, -1] / self.temperature
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=self.generator)
            tokens = torch.cat([tokens, drawn], dim=1)
        rows: list[list[int]] = tokens.tolist()
        return rows

    def _logged(self, tokens: list[int]) -> list[float]:
        """Logprobs of the completion only."""
        exact = torch.tensor(logprobs(self.policy, tokens, self.temperature)[PROMPT - 1 :])
        noise = self.drift * torch.randn(len(exact), generator=self.generator)
        logged: list[float] = (exact + noise).clamp(max=0.0).tolist()
        return logged


def with_logprobs(group: ScoredGroup, change: Callable[[list[float]], list[float]]) -> ScoredGroup:
    """Args: change: changes one sequence's logprobs"""
    rows = [change(row) for row in group.inference_logprobs or []]
    return group.model_copy(update={"inference_logprobs": rows})


def late(group: ScoredGroup) -> ScoredGroup:
    """The first trained position keeps a plausible value, so that only a comparison shows the
    shift."""
    return with_logprobs(group, lambda row: [*row[:PROMPT], -0.5, *row[PROMPT:-1]])


def early(group: ScoredGroup) -> ScoredGroup:
    return with_logprobs(group, lambda row: [*row[:PROMPT], *row[PROMPT + 1 :], -0.5])


def unmasked(values: Callable[[list[int]], list[float]]) -> Fault:
    """All prompt tokens but the first are trained on, with these logprobs."""

    def fault(group: ScoredGroup) -> ScoredGroup:
        masks = [[MASKED, *tokens[1:]] for tokens in group.tokens]
        of_prompt = values(group.tokens[0][:PROMPT])
        trained = group.model_copy(update={"masks": masks})
        return with_logprobs(trained, lambda row: [PROMPT_LOGPROB, *of_prompt, *row[PROMPT:]])

    return fault


class Check(RolloutCheck):
    """That of a policy that does not move, and that has remembered some tokens of older weights."""

    def __init__(self, policy: Any, served: ServedLogprobs | None = None) -> None:
        movement = Movement(policy)
        super().__init__(policy, served or (lambda ids: logprobs(policy, ids)), TOLERANCE, movement)
        batch = collated(*Sampler(policy).groups(), micro_batch_size=5)
        table = accumulate_gradients(policy, batch, GRPO, step=0).tokens
        movement.remember(batch, table, OLDER)


def found(check: Check, policy: Any, groups: list[ScoredGroup], step: int) -> list[Finding]:
    batch = collated(*groups, micro_batch_size=5)
    table = accumulate_gradients(policy, batch, GRPO, step=step).tokens
    now = PolicyVersion(2, 8 + step)
    check._movement.remember(batch, table, now)
    return [*check.findings(batch, table, now)]


def judge(
    policy: Any, batches: Sequence[list[ScoredGroup]], check: Check | None = None
) -> tuple[int, str]:
    """(number of batches that passed, the mismatch's message or "")"""
    check = check or Check(policy)
    for number, groups in enumerate(batches):
        try:
            found(check, policy, groups, step=0)
        except RolloutMismatch as mismatch:
            return number, str(mismatch)
    return len(batches), ""


def binary(group: ScoredGroup) -> ScoredGroup:
    """Binary logarithms."""
    return with_logprobs(group, lambda row: [v / math.log(2) if v < 0 else v for v in row])


def rounded(group: ScoredGroup) -> ScoredGroup:
    """To bfloat16."""
    return with_logprobs(group, lambda row: torch.tensor(row).bfloat16().tolist())


FAULTS: dict[str, tuple[dict[str, Any], Cause]] = {
    "rounded": ({"fault": rounded}, Cause.ROUNDED),
    "binary": ({"fault": binary}, Cause.SCALED),
    "version": ({"drift": 0.1}, Cause.VERSION),
    "late": ({"fault": late}, Cause.LOGPROBS_LATE),
    "early": ({"fault": early}, Cause.LOGPROBS_EARLY),
    "prompt": ({"fault": unmasked(lambda _: [-0.5] * (PROMPT - 1))}, Cause.PROMPT_TRAINED),
    "temperature": ({"temperature": 0.7}, Cause.TEMPERATURE),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_fresh_data_is_named_at_once(policy: Any, name: str) -> None:
    options, cause = FAULTS[name]
    passed, message = judge(policy, [Sampler(policy, **options).groups()])
    assert passed == 0
    assert message.startswith("LogProb Alignment: MISMATCH!")
    assert f"Likely cause: {cause}." in message
    assert "environment 0" in message


def test_a_mismatch_that_nothing_explains_lists_every_cause_in_order(policy: Any) -> None:
    def silent(_: list[int]) -> list[float]:
        raise ServiceUnavailable("no answer")

    def too_low(group: ScoredGroup) -> ScoredGroup:
        """Every second one, which no shift, temperature or factor explains."""
        return with_logprobs(
            group, lambda row: [v - 3.0 * (i % 2) if v < 0 else v for i, v in enumerate(row)]
        )

    groups = Sampler(policy, fault=too_low).groups()
    _, message = judge(policy, [groups], Check(policy, silent))
    places = [message.index(f"({i}) {cause}") for i, cause in enumerate(Cause, 1)]
    assert places == sorted(places)
    assert "the server did not answer (no answer)" in message


@pytest.mark.parametrize(
    ("fault", "drift", "batches", "version"),
    [
        ("late", 0.02, 1, OLDER),
        ("late", 0.02, 1, None),
        ("early", 0.3, 2, OLDER),
        ("early", 0.3, 2, None),
        ("temperature", 0.05, 2, OLDER),
    ],
)
def test_without_fresh_data_a_cause_is_believed_once_it_is_sure(
    policy: Any, fault: str, drift: float, batches: int, version: PolicyVersion | None
) -> None:
    """Found in the first batch if the policy hardly moved, else in the second one."""
    options, cause = FAULTS[fault]
    sampler = Sampler(policy, version=version, drift=drift, **options)
    passed, message = judge(policy, [sampler.groups() for _ in range(3)])
    assert passed == batches - 1
    assert f"Likely cause: {cause}." in message


def test_another_temperature_behind_a_large_drift_is_reported_in_the_second_batch(
    policy: Any,
) -> None:
    sampler, check = Sampler(policy, temperature=0.7, version=OLDER, drift=0.4), Check(policy)
    names = [[str(f.check) for f in found(check, policy, sampler.groups(), i)] for i in range(3)]
    assert names == [[], ["temperature"], ["temperature"]]


@pytest.mark.parametrize("version", [OLDER, None])
def test_a_policy_that_became_more_certain_is_no_other_temperature(version: Any) -> None:
    """Its logits have grown by half, which is exactly what a temperature of 1.5 looks like. The
    check abstains, and so it does if it does not know which weights sampled."""
    policy = qwen(tie_word_embeddings=False, initializer_range=0.15)
    groups, check = Sampler(policy, version=version).groups(), Check(policy)
    with torch.no_grad():
        policy.lm_head.weight.mul_(1.5)
    for _ in range(3):
        assert found(check, policy, groups, step=0) == []
        assert check.is_moot


def test_a_suspicion_that_the_next_batch_does_not_share_is_forgotten(policy: Any) -> None:
    honest = Sampler(policy, version=None, drift=0.3)
    broken = Sampler(policy, version=None, drift=0.3, fault=late)
    batches = [sampler.groups() for _ in range(3) for sampler in (broken, honest)]
    assert judge(policy, batches) == (6, "")


@pytest.mark.parametrize("version", [HELD, None])
def test_a_shared_beginning_that_sampling_cannot_give_is_a_trained_prompt(
    policy: Any, version: PolicyVersion | None
) -> None:
    """Found even with the prompt's true logprobs, for which every ratio is one."""
    fault = unmasked(lambda prompt: logprobs(policy, prompt))
    groups = Sampler(policy, version=version, fault=fault).groups()
    passed, message = judge(policy, [groups])
    assert passed == 0
    assert f"ikely cause: {Cause.PROMPT_TRAINED}." in message


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6, "says": {"temperature": 0.6}},
        {"version": OLDER, "drift": 0.3},
        {"version": None, "temperature": 1.4, "says": {"temperature": 1.4}, "drift": 0.1},
    ],
)
def test_honest_data_passes_fresh_or_old(policy: Any, options: dict[str, Any]) -> None:
    sampler = Sampler(policy, **options)
    assert judge(policy, [sampler.groups() for _ in range(3)]) == (3, "")


def test_one_broken_environment_among_good_ones_is_named(policy: Any) -> None:
    honest, broken = Sampler(policy, env_id=1), Sampler(policy, env_id=8, fault=late)
    passed, message = judge(policy, [[*honest.groups(), *broken.groups()]])
    assert passed == 0
    assert "environment 8" in message


def one_off(group: ScoredGroup, by: float = 0.5) -> ScoredGroup:
    """The second logprob of the first completion is wrong."""
    first, *others = group.inference_logprobs or []
    wrong = [*first[: PROMPT + 1], first[PROMPT + 1] - by, *first[PROMPT + 2 :]]
    return group.model_copy(update={"inference_logprobs": [wrong, *others]})


def test_a_few_outliers_among_few_tokens_do_not_end_the_run_but_are_reported(policy: Any) -> None:
    """One token of 72 is wrong by 0.5: a mean of 0.007, seven times the tolerance."""
    first, *others = Sampler(policy).groups()
    honest = Sampler(policy, env_id=1).groups()
    (one,) = found(Check(policy), policy, [one_off(first), *others, *honest], step=0)
    assert (one.check, one.env_id) == ("single_tokens", 0)
    assert "sampled 72 trained tokens" in one.reason
    assert "of 1 of them, in 1 completions, differ" in one.reason
    assert "by more than 0.02, by 0.5 at most" in one.reason
    assert "token ids of the server's response" in one.hint


@pytest.mark.parametrize(
    ("options", "by"),
    [
        ({}, 0.9 * SINGLE_TOKEN_FACTOR * TOLERANCE),
        ({"temperature": 0.5, "says": {"temperature": 0.5}}, 1.8 * SINGLE_TOKEN_FACTOR * TOLERANCE),
        ({"version": OLDER}, 0.5),
        ({"version": None}, 0.5),
    ],
)
def test_a_single_token_proves_nothing_near_the_noise_or_if_other_weights_may_have_sampled_it(
    policy: Any, options: dict[str, Any], by: float
) -> None:
    first, *others = Sampler(policy, **options).groups()
    assert found(Check(policy), policy, [one_off(first, by), *others], step=0) == []


def test_a_completion_that_new_weights_continued_is_not_fresh(policy: Any) -> None:
    first, *others = Sampler(policy).groups()
    versions = [[OLDER, HELD], *[[HELD, HELD]] * (SIZE - 1)]
    continued = one_off(first).model_copy(update={"group_overrides": {"policy_version": versions}})
    assert found(Check(policy), policy, [continued, *others], step=0) == []


def test_rounded_logprobs_of_which_one_is_far_off_are_called_rounded() -> None:
    """bfloat16 has 8 bits: -6.015 becomes -6, and -0.25 remains."""
    exact = table_of([[-0.25] * 30 + [-6.015]])
    logged = exact.behaviour_logp.bfloat16().float()
    (one,) = single_tokens(0, replace(exact, behaviour_logp=logged), tolerance=2e-4)
    assert "by more than 0.004, by 0.015 at most" in one.reason
    assert "rounding to bfloat16 explains" in one.hint


def table_of(logp: list[list[float]]) -> TokenTable:
    """One row for each sequence; the first trained token is the second one."""
    values = torch.tensor([value for row in logp for value in row])
    return TokenTable(
        logp=values,
        entropy=torch.zeros_like(values),
        above=torch.zeros_like(values),
        behaviour_logp=values,
        temperature=torch.ones_like(values),
        sequence=torch.tensor([i for i, row in enumerate(logp) for _ in row]),
        position=torch.tensor([1 + t for row in logp for t in range(len(row))]),
    )


def test_unlikely_shared_beginnings_by_hand() -> None:
    """Each token counts (nats beyond 0.2) times (siblings - 1): 4.8 * 3 = 14.4 for -5 of 4."""
    for logp, shared_tokens, siblings, is_unlikely in (
        ([-5.0] * 2, 9, 4, False),
        ([-5.0] * 3, 9, 4, True),
        ([-5.0] * 3, 3, 4, False),  # the third token is not shared
        ([-5.0] * 99, 99, 1, False),  # a group of one
        ([-0.15] * 300, 400, 8, False),  # nearly certain when sampled, slightly less certain now
    ):
        one = group(
            tokens=[[5, 7]] * siblings,
            masks=[[MASKED, 7]] * siblings,
            scores=[0.0] * siblings,
            inference_logprobs=[[PROMPT_LOGPROB, -0.1]] * siblings,
        )
        sequences = [replace(s, shared_tokens=shared_tokens) for s in usable(one)]
        unlikely = groups_with_unlikely_prefix(table_of([logp] * siblings), sequences)
        assert unlikely == ({0} if is_unlikely else set())
