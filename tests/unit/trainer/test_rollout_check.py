"""Faults in what the environment sends, found and named on the batch that shows them.

Completions are really sampled from a small random model, whose own log-probabilities are logged;
then one thing is broken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_core.errors import ServiceUnavailable
from grpo_core.wire import MASKED, PROMPT_LOGPROB, PolicyVersion, ScoredGroup
from grpo_trainer.batch import Batch
from grpo_trainer.errors import RolloutMismatch
from grpo_trainer.gradients import accumulate_gradients
from grpo_trainer.policy import token_logprobs
from grpo_trainer.rollout_causes import Cause
from grpo_trainer.rollout_check import RolloutCheck
from grpo_trainer.token_table import Distance
from tests.unit.trainer.groups import collated

HELD = PolicyVersion(2, 5)
OLDER = PolicyVersion(2, 4)
TOLERANCE = 1e-3
SIZE, LENGTH = 4, 6
PROMPTS = ([3, 14, 15, 9, 2], [6, 5, 35, 8, 9], [7, 9, 3, 2, 38])


@pytest.fixture(scope="module")
def policy() -> Any:
    """Random, but sure enough of itself that log-probabilities differ from token to token."""
    return small_policy(seed=0)


def small_policy(seed: int) -> Any:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return model


def logprobs(policy: Any, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
    """[T] → [T-1]"""
    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        logp = token_logprobs(policy, ids[:, :-1], ids[:, 1:], torch.tensor([temperature]))
    values: list[float] = logp[0].tolist()
    return values


@dataclass
class Sampler:
    """`drift`: standard deviation of noise on the logged values, as older weights would leave."""

    policy: Any
    temperature: float = 1.0
    version: PolicyVersion | None = HELD
    drift: float = 0.0
    says: dict[str, Any] = field(default_factory=dict)
    env_id: int | None = 0
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    def group(self, prompt: list[int]) -> ScoredGroup:
        rows = self._complete(prompt)
        logged = [self._logged(row)[len(prompt) - 1 :] for row in rows]
        versions = [[self.version, self.version]] * SIZE if self.version else []
        return ScoredGroup(
            tokens=rows,
            masks=[[MASKED] * len(prompt) + row[len(prompt) :] for row in rows],
            scores=[float(i) for i in range(SIZE)],
            inference_logprobs=[[PROMPT_LOGPROB] * len(prompt) + values for values in logged],
            generation_params=self.says,
            group_overrides={"policy_version": versions},
            env_id=self.env_id,
        )

    def groups(self) -> list[ScoredGroup]:
        return [self.group(prompt) for prompt in PROMPTS]

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
        exact = torch.tensor(logprobs(self.policy, tokens, self.temperature))
        noise = self.drift * torch.randn(len(exact), generator=self.generator)
        return (exact + noise).clamp(max=0.0).tolist()


def changed(group: ScoredGroup, **changes: Any) -> ScoredGroup:
    return ScoredGroup.model_validate(group.model_dump() | changes)


def late(group: ScoredGroup) -> ScoredGroup:
    """The first trained position keeps a plausible value, so that only the numbers tell."""
    assert group.inference_logprobs
    rows = [[*r[:5], -0.5, *r[5:-1]] for r in group.inference_logprobs]
    return changed(group, inference_logprobs=rows)


def early(group: ScoredGroup) -> ScoredGroup:
    assert group.inference_logprobs
    rows = [[*r[:5], *r[6:], -0.5] for r in group.inference_logprobs]
    return changed(group, inference_logprobs=rows)


def unmasked(values: Callable[[list[int]], list[float]]) -> Callable[[ScoredGroup], ScoredGroup]:
    """All of the prompt but its first token is trained on, with these logprobs."""

    def fault(group: ScoredGroup) -> ScoredGroup:
        assert group.inference_logprobs
        return changed(
            group,
            masks=[[MASKED, *tokens[1:]] for tokens in group.tokens],
            inference_logprobs=[
                [1.0, *values(tokens[:5]), *logged[5:]]
                for tokens, logged in zip(group.tokens, group.inference_logprobs, strict=True)
            ],
        )

    return fault


def judge(
    policy: Any,
    batches: Sequence[list[ScoredGroup]],
    served: Callable[[list[int]], list[float]] | None = None,
) -> tuple[int, str]:
    """(batches that passed, the message of the mismatch or "")"""
    check = RolloutCheck(policy, served or (lambda ids: logprobs(policy, ids)), TOLERANCE)
    for step, groups in enumerate(batches):
        batch = collated(*groups, micro_batch_size=5)
        table = accumulate_gradients(policy, batch, clip_eps=0.2, step=step).tokens
        try:
            check.require_match(batch, table, HELD, step)
        except RolloutMismatch as mismatch:
            return step, str(mismatch)
    return len(batches), ""


FAULTS: dict[str, tuple[Callable[[ScoredGroup], ScoredGroup], Cause]] = {
    "late": (late, Cause.LOGPROBS_LATE),
    "early": (early, Cause.LOGPROBS_EARLY),
    "unmasked prompt, constant": (unmasked(lambda _: [-0.5] * 4), Cause.PROMPT_TRAINED),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_fresh_data_is_named_at_once(policy: Any, name: str) -> None:
    fault, cause = FAULTS[name]
    groups = [fault(group) for group in Sampler(policy).groups()]
    passed, message = judge(policy, [groups])
    assert passed == 0
    assert message.startswith("LogProb Alignment: MISMATCH!")
    assert f"Likely cause: {cause}." in message
    assert "environment 0" in message
    assert "asked now: " in message


@pytest.mark.parametrize("said", [{}, {"temperature": 1.0}])
def test_another_temperature_than_said_is_named_with_the_right_one(
    policy: Any, said: dict[str, float]
) -> None:
    passed, message = judge(policy, [Sampler(policy, temperature=0.7, says=said).groups()])
    assert passed == 0
    assert f"Likely cause: {Cause.TEMPERATURE}." in message
    assert "sampled at temperature 0.7" in message or "sampled at temperature 0.69" in message


def test_a_server_with_other_weights_is_told_from_a_broken_environment(policy: Any) -> None:
    other = small_policy(seed=1)
    groups = Sampler(other).groups()
    passed, message = judge(policy, [groups], served=lambda ids: logprobs(other, ids))
    assert passed == 0
    assert f"Likely cause: {Cause.STALE_WEIGHTS}." in message


def test_what_nothing_explains_lists_every_cause_in_order(policy: Any) -> None:
    def silent(_: list[int]) -> list[float]:
        raise ServiceUnavailable("no answer")

    groups = [
        changed(g, inference_logprobs=[[min(0.0, v) - 3.0 * (v < 1) for v in r] for r in rows])
        for g in Sampler(policy).groups()
        if (rows := g.inference_logprobs)
    ]
    passed, message = judge(policy, [groups], served=silent)
    assert passed == 0
    assert "None of these explains it" in message
    assert [message.index(f"({i}) {cause}") for i, cause in enumerate(Cause, 1)] == sorted(
        message.index(f"({i}) {cause}") for i, cause in enumerate(Cause, 1)
    )
    assert "not answered: no answer" in message


@pytest.mark.parametrize("version", [OLDER, None])
@pytest.mark.parametrize(("drift", "batches"), [(0.02, 1), (0.3, 2)])
@pytest.mark.parametrize("name", ["late", "early"])
def test_without_fresh_data_a_shift_is_believed_once_it_is_sure(
    policy: Any, name: str, drift: float, batches: int, version: PolicyVersion | None
) -> None:
    """At once where the policy hardly moved, in the second batch where it did."""
    fault, cause = FAULTS[name]
    sampler = Sampler(policy, version=version, drift=drift)
    passed, message = judge(policy, [[fault(g) for g in sampler.groups()] for _ in range(3)])
    assert passed == batches - 1
    assert f"Likely cause: {cause}." in message


@pytest.mark.parametrize(("drift", "batches"), [(0.005, 1), (0.05, 2)])
def test_without_fresh_data_a_temperature_is_believed_once_it_is_sure(
    policy: Any, drift: float, batches: int
) -> None:
    sampler = Sampler(policy, version=None, drift=drift, temperature=0.7)
    passed, message = judge(policy, [sampler.groups() for _ in range(3)])
    assert passed == batches - 1
    assert f"Likely cause: {Cause.TEMPERATURE}." in message


def test_a_suspicion_that_the_next_batch_does_not_share_is_forgotten(policy: Any) -> None:
    honest, broken = (
        Sampler(policy, version=None, drift=0.3),
        Sampler(policy, version=None, drift=0.3),
    )
    batches = [
        [late(g) for g in broken.groups()] if step % 2 == 0 else honest.groups()
        for step in range(6)
    ]
    assert judge(policy, batches) == (6, "")


@pytest.mark.parametrize("version", [HELD, OLDER, None])
@pytest.mark.parametrize("true_values", [True, False])
def test_a_shared_beginning_that_sampling_cannot_give_is_prompt(
    policy: Any, version: PolicyVersion | None, true_values: bool
) -> None:
    """Even with the true log-probabilities of the prompt, where every ratio is one."""

    def values(prompt: list[int]) -> list[float]:
        return logprobs(policy, prompt) if true_values else [-0.5] * 4

    groups = [unmasked(values)(group) for group in Sampler(policy, version=version).groups()]
    passed, message = judge(policy, [groups])
    assert passed == 0
    assert f"ikely cause: {Cause.PROMPT_TRAINED}." in message


@pytest.mark.parametrize(
    "sampler_options",
    [
        {},
        {"temperature": 0.6, "says": {"temperature": 0.6}},
        {"version": OLDER, "drift": 0.3},
        {"version": None, "drift": 0.3},
        {"version": None, "temperature": 1.4, "says": {"temperature": 1.4}, "drift": 0.1},
    ],
)
def test_honest_data_passes_fresh_or_old(policy: Any, sampler_options: dict[str, Any]) -> None:
    sampler = Sampler(policy, **sampler_options)
    assert judge(policy, [sampler.groups() for _ in range(6)]) == (6, "")


def test_one_broken_environment_among_good_ones_is_named(policy: Any) -> None:
    honest = Sampler(policy, env_id=1).groups()
    broken = [late(group) for group in Sampler(policy, env_id=8).groups()]
    passed, message = judge(policy, [[*honest, *broken]])
    assert passed == 0
    assert "environment 8" in message


def test_a_few_outliers_among_few_tokens_prove_nothing(policy: Any) -> None:
    """One token of 72 that is off by 0.5: a mean of 0.007, seven times the tolerance."""
    groups = Sampler(policy).groups()
    logged = groups[0].inference_logprobs
    assert logged
    logged[0][6] -= 0.5
    assert judge(policy, [[changed(groups[0], inference_logprobs=logged), *groups[1:]]]) == (1, "")


def test_what_is_reported_covers_fresh_tokens_only(policy: Any) -> None:
    fresh, old = Sampler(policy).groups(), Sampler(policy, version=OLDER, drift=0.3).groups()
    batch: Batch = collated(*fresh, *old)
    table = accumulate_gradients(policy, batch, clip_eps=0.2, step=0).tokens
    found = RolloutCheck(policy, lambda ids: logprobs(policy, ids), TOLERANCE).require_match(
        batch, table, HELD, step=0
    )
    assert found.tokens == len(PROMPTS) * SIZE * LENGTH
    assert found.max < 1e-4
    assert Distance.of(table).mean > 0.05
