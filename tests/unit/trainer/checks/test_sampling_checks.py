"""Tokens sampled from known distributions: honest ones pass at any age, others are named.

Legend: N tokens, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from grpo_core.tree.objectives import GRPO
from grpo_core.wire.fields import MASKED
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.checks.evidence import Movement, at_most
from grpo_trainer.checks.findings import CheckName
from grpo_trainer.checks.sampling import RatioCheck, SamplingCheck, UnfilteredGroups
from grpo_trainer.data.collate import Batch
from grpo_trainer.learner import accumulate_gradients
from grpo_trainer.model.logprobs import probability_above
from grpo_trainer.token_table import TokenTable
from tests.unit.trainer.forward_rig import qwen
from tests.unit.trainer.groups import collated, group, usable

V, SEQUENCES, LENGTH, STEPS = 40, 64, 5, 10
N = SEQUENCES * LENGTH
Change = Callable[[Tensor], Tensor]


def unchanged(values: Tensor) -> Tensor:
    return values


def top_p(logits: Tensor, limit: float = 0.8) -> Tensor:
    """Logits of the smallest set of tokens with this probability; -inf for all others."""
    ordered, order = logits.softmax(-1).sort(descending=True)
    is_out = (ordered.cumsum(-1) - ordered > limit).gather(-1, order.argsort(-1))
    return logits.masked_fill(is_out, -torch.inf)


class Sampler:
    """Args:
    drift: standard deviation of the change of the logits since the sampling
    sampling: changes the logits from which tokens are sampled
    logging: changes the logprobs of the whole distribution that are logged
    sharpness: standard deviation of the logits
    jump: the new logit of a token that was hardly ever sampled; 0: there is none
    """

    def __init__(
        self,
        drift: float,
        sampling: Change = unchanged,
        logging: Change = unchanged,
        sharpness: float = 2.0,
        jump: float = 0.0,
    ) -> None:
        self.drift, self.sampling, self.logging = drift, sampling, logging
        self.sharpness, self.jump = sharpness, jump
        self.generator = torch.Generator().manual_seed(0)

    def total_variation(self) -> float:
        """Of old and new logits, as `Movement` measures it."""
        return at_most((-self.table().diff.expm1()).clamp(min=0.0))

    def table(self) -> TokenTable:
        old = self.sharpness * torch.randn(N, V, generator=self.generator)
        new = old + self.drift * torch.randn(N, V, generator=self.generator)
        if self.jump:
            old[:, 0], new[:, 0] = -8.0, self.jump
        chosen = torch.multinomial(self.sampling(old).softmax(-1), 1, generator=self.generator)
        logged, logp = (logits.log_softmax(-1).gather(-1, chosen)[:, 0] for logits in (old, new))
        number = torch.arange(N)
        return TokenTable(
            logp=logp,
            entropy=torch.zeros(N),
            above=probability_above(new, chosen[:, 0]),
            behaviour_logp=self.logging(logged),
            temperature=torch.ones(N),
            sequence=number // LENGTH,
            position=1 + number % LENGTH,
        )


@pytest.mark.parametrize("drift", [0.0, 0.1])
@pytest.mark.parametrize(
    ("logging", "place"),
    [
        (unchanged, None),
        (lambda logp: 0.8 * logp, "first all"),
        (lambda logp: 1.44 * logp, "first all"),
        (lambda logp: logp.where(torch.arange(N) % LENGTH > 0, logp - 0.5), "first all"),
        (lambda logp: logp.where(torch.arange(N) % LENGTH < LENGTH - 1, -0.01), "all"),
    ],
)
def test_the_mean_ratio_shows_wrong_logprobs_at_any_age(
    drift: float, logging: Change, place: str | None
) -> None:
    check, sampler = RatioCheck(), Sampler(drift, logging=logging)
    moved = Sampler(drift).total_variation
    found = {
        (finding.env_id, finding.reason.partition("(")[2].partition(" of each")[0])
        for _ in range(STEPS if place else 5 * STEPS)
        for finding in check.findings(sampler.table(), 3, moved)
    }
    assert found == {(3, name) for name in (place or "").split()}


def test_probability_that_moves_to_other_tokens_is_no_wrong_logprob() -> None:
    """A token that was hardly ever sampled becomes likely: the ratios of all others fall. Six
    standard errors of the sampled ratios do not cover this."""
    check, sampler = RatioCheck(), Sampler(0.0, jump=4.0)
    off = torch.cat([sampler.table().diff for _ in range(8)]).exp().clamp(max=10) - 1
    errors = float(off.mean() / off.std() * len(off) ** 0.5)
    assert errors < -6
    assert float(off.mean()) < -0.05
    for _ in range(5 * STEPS):
        assert [*check.findings(sampler.table(), 0, sampler.total_variation)] == []
    assert check.evidence.is_moot


def findings(sampler: Sampler, steps: int) -> set[CheckName]:
    check, moved = SamplingCheck(), Sampler(sampler.drift).total_variation
    return {
        finding.check
        for step in range(steps)
        for finding in check.findings(sampler.table(), 0, step, moved)
    }


@pytest.mark.parametrize("drift", [0.0, 0.1])
@pytest.mark.parametrize(
    "sampling", [top_p, lambda logits: top_p(logits, 0.9), lambda logits: logits / 0.6]
)
def test_a_missing_end_of_the_distribution_is_found_at_any_age(
    drift: float, sampling: Change
) -> None:
    """Every logprob is that of the whole distribution, so the mean ratio shows nothing."""
    assert findings(Sampler(drift, sampling), 2 * STEPS) == {CheckName.TRUNCATED_SAMPLING}


@pytest.mark.parametrize("drift", [0.0, 0.3])
@pytest.mark.parametrize("sharpness", [1.0, 10.0])
def test_honest_tokens_pass_also_of_a_nearly_certain_policy(drift: float, sharpness: float) -> None:
    assert findings(Sampler(drift, sharpness=sharpness), 5 * STEPS) == set()


def test_groups_that_an_environment_drops_do_not_shift_the_mean() -> None:
    """Of groups of 4 with 0.9 right answers, those with a wrong one are sent. Once 0.97 are right,
    their mean ratio is 0.85, but that of completions whose siblings are mixed is 1."""
    generator, check, mean = torch.Generator().manual_seed(0), RatioCheck(), []
    free = UnfilteredGroups()
    for _ in range(5 * STEPS):
        right = torch.rand(400, 4, generator=generator) < 0.9
        sent = right[~right.all(1) & right.any(1)]
        groups = [
            group(
                tokens=[[5, 6, 7]] * 4,
                masks=[[MASKED, MASKED, 7]] * 4,
                inference_logprobs=[[1.0, 1.0, -0.1]] * 4,
                scores=scores,
            )
            for scores in sent[:32].float().tolist()
        ]
        ratio = torch.where(sent[:32], 0.97 / 0.9, 0.3).flatten()
        table = table_of(ratio.log())
        chosen = table.of_sequences(free.of(Batch([], usable(*groups), (), groups)))
        mean += ratio.tolist()
        assert [*check.findings(table.where(chosen), 0, lambda: 0.0)] == []
    assert sum(mean) / len(mean) == pytest.approx(0.85, abs=0.02)


def table_of(diff: Tensor) -> TokenTable:
    """Sequences of one token."""
    number, zeros = torch.arange(len(diff)), torch.zeros(len(diff))
    return TokenTable(diff, zeros, zeros, zeros, zeros + 1, number, number)


def test_the_movement_is_that_of_the_trainers_own_logprobs() -> None:
    """Since the oldest weights that sampled the batch; unknown without those, or for a version
    that is not stated."""
    policy = qwen(tie_word_embeddings=False, initializer_range=0.15)
    movement = Movement(policy)

    def of(step: int | None) -> Batch:
        versions = {} if step is None else {"policy_version": [[[1, step], [1, 9]]] * 2}
        return collated(*[group(group_overrides=versions)] * 8)

    def logprobs(batch: Batch) -> TokenTable:
        return accumulate_gradients(policy, batch, GRPO, step=0).tokens

    for step in (3, 4):
        movement.remember(of(step), logprobs(of(step)), PolicyVersion(1, step))
    before = logprobs(of(4)).logp
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.02)
    movement.remember(of(4), logprobs(of(4)), PolicyVersion(1, 5))
    change = logprobs(of(4)).logp - before
    known = movement.distance(None, of(4))
    assert known == pytest.approx(float(change.abs().mean()), rel=0.5)
    assert known
    assert movement.distance(None, of(5)) == 0
    assert movement.distance(None, of(2)) is None
    assert movement.distance(None, of(None)) is None


def test_the_probability_above_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.2, 0.3], [0.5, 0.2, 0.3]]).log()
    assert probability_above(logits, torch.tensor([1, 0])).tolist() == pytest.approx([0.8, 0.0])
