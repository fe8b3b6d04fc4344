"""The check of a publication detects every kind of wrong weights on the server."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.checks.served_weights import (
    Bound,
    ProbeLengths,
    PublicationCheck,
)
from grpo_trainer.errors import ServedWeightsDiffer
from grpo_trainer.model.adapter import adapted_layers, adapter_scaled
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.model.logprobs import kernel_noise, logprobs_of, probe_tokens, sampled_tokens
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from tests.unit.trainer.forward_rig import VOCABULARY, qwen
from tests.unit.trainer.served_model import BLOCK, ServedModel
from tests.unit.trainer.tiny_policy import LORA, move, optimizer_of

START, VERSION = PolicyVersion(1, 0), PolicyVersion(1, 3)


@dataclass
class Run:
    """A trainer of a tiny model, just before its third publication."""

    policy: Any
    base: Any
    optimizer: MasterOptimizer
    server: ServedModel
    check: PublicationCheck
    previous: Any = None

    @classmethod
    def of(cls, policy: Any, lr: float = 0.05) -> Run:
        base, server = copy.deepcopy(policy), ServedModel(copy.deepcopy(policy))
        check = PublicationCheck(policy, server, ProbeLengths.fitting(BLOCK, 256))
        run = cls(policy, base, optimizer_of(policy, lr), server, check)
        for step in (0, 1):
            run.update(step)
            server.swap(policy, PolicyVersion(1, step + 1))
            check.require(PolicyVersion(1, step + 1), "After step")
        run.update(2)
        return run

    def update(self, step: int) -> None:
        self.previous = copy.deepcopy(self.policy)
        move(self.policy, self.optimizer, step)
        self.check.prime()

    def keep_cache(self) -> None:
        """Only the sampled tokens can show it: fixed tokens are computed without the cache."""
        self.server.blocks.clear()  # the server had dropped the prompt from its cache
        self.server.swap(self.previous, VERSION)
        self.check.prime()
        self.server.swap(self.policy, VERSION, keep_cache=True)


@pytest.fixture(scope="module", params=["adapter", "whole model"])
def run(request: pytest.FixtureRequest, model: str) -> Run:
    torch.manual_seed(1)
    weights = TrainedWeights(model, LORA if request.param == "adapter" else None)
    return Run.of(weights.load(torch.float32).eval())


@pytest.mark.parametrize(
    ("serve", "told"),
    [
        (lambda r: r.server.swap(r.base, VERSION), "the model that it was started with"),
        (lambda r: r.server.swap(r.previous, VERSION), "the weights of the previous publication"),
        (lambda r: r.server.swap(r.policy, PolicyVersion(2, 0)), r"names policy version \(2, 0\)"),
        (Run.keep_cache, r"fixed tokens agree .* are still in the server's KV cache"),
    ],
    ids=["base", "previous", "another version", "kept keys and values"],
)
def test_other_weights_are_refused_with_the_likely_cause(
    serve: Callable[[Run], None], told: str, run: Run
) -> None:
    serve(run)
    with pytest.raises(ServedWeightsDiffer, match=told):
        run.check.require(VERSION, "After step 3")


def test_an_adapter_of_another_scale_or_without_a_layer_and_dropout_are_named(model: str) -> None:
    lora = replace(LORA, dropout=0.5)
    run = Run.of(TrainedWeights(model, lora).load(torch.float32).eval())
    with adapter_scaled(run.policy, 4.0):
        run.server.swap(run.policy, VERSION)
    with pytest.raises(ServedWeightsDiffer, match=r"by 4 times the trainer's scale"):
        run.check.require(VERSION, "After step 2")
    with adapter_scaled(run.policy, 0.0, adapted_layers(run.policy)[1]):
        run.server.swap(run.policy, VERSION)
    with pytest.raises(ServedWeightsDiffer, match=r"the adapter's part of \S+\.layers\.1;"):
        run.check.require(VERSION, "After step 2")
    run.server.swap(run.policy, VERSION)
    run.policy.train()
    with pytest.raises(ServedWeightsDiffer, match="dropout is on in the trainer's policy"):
        run.check.require(VERSION, "After step 2")


def test_the_published_weights_pass_with_the_distance_that_they_moved(run: Run) -> None:
    run.server.swap(run.policy, VERSION)
    check = copy.copy(run.check)  # a check that passes remembers these weights as the previous ones
    found = check.require(VERSION, "After step 3")
    assert found.mean < 1e-5
    assert found.sampled_mean is not None
    assert found.sampled_mean < 1e-5
    assert found.moved > 0.01


@pytest.mark.parametrize("served", ["base", "previous"])
def test_an_update_below_the_tolerance_of_its_data_type_is_missed_if_absent(
    served: str, model: str
) -> None:
    """In bfloat16 the noise is 0.003 and the tolerance 0.02; these updates move the logprobs by
    0.021 and 0.012."""
    torch.manual_seed(1)
    run = Run.of(TrainedWeights(model).load(torch.bfloat16).eval(), lr=0.0015)
    run.server.swap({"base": run.base, "previous": run.previous}[served], VERSION)
    cause = {"base": "was started with, without", "previous": "previous publication"}[served]
    with pytest.raises(ServedWeightsDiffer, match=cause):
        run.check.require(VERSION, "After step 3")
    run.server.swap(run.policy, VERSION)
    assert 0.003 < run.check.require(VERSION, "After step 3").moved < 0.05


def started(
    model: str, dtype: torch.dtype = torch.float32, noise: float = 0.0, **options: Any
) -> tuple[Any, ServedModel, PublicationCheck]:
    """A policy, a server of its weights, and the check, before the first step."""
    torch.manual_seed(1)
    policy = TrainedWeights(model).load(dtype).eval()
    server = ServedModel(copy.deepcopy(policy), START, noise=noise)
    return policy, server, PublicationCheck(policy, server, **options)


NOISE = 3.6e-4
"""In float32 the tolerance without noise is 2e-4."""


def test_noise_is_learnt_before_any_update_and_an_update_that_is_absent_still_found(
    model: str,
) -> None:
    policy, server, check = started(model, noise=NOISE)
    previous, optimizer = copy.deepcopy(policy), optimizer_of(policy, lr=0.0015)
    assert check.require(START, "At the start").mean == pytest.approx(NOISE, rel=0.05)

    move(policy, optimizer, 0)
    server.swap(previous, VERSION)
    with pytest.raises(ServedWeightsDiffer):
        check.require(VERSION, "After step 1")
    server.swap(policy, VERSION)
    assert copy.copy(check).require(VERSION, "After step 1").moved > 4 * NOISE
    server.noise = 4.2 * NOISE
    with pytest.raises(ServedWeightsDiffer, match=r"tolerance 0\.0014"):
        check.require(VERSION, "After step 1")


def test_noise_that_has_grown_with_training_is_measured_anew(model: str) -> None:
    """Larger logits are rounded further in bfloat16."""
    policy, server, check = started(model, torch.bfloat16)
    check.require(START, "At the start")
    tokens = sampled_tokens(policy)
    with torch.no_grad():
        policy.model.norm.weight *= 40
    server.swap(policy, VERSION)
    server.noise = 3 * kernel_noise(policy, tokens)
    with capture_logs() as logs:
        assert copy.copy(check).require(VERSION, "After step 300").mean > check.bound.value
    assert [entry["event"] for entry in logs] == ["alignment.noise_measured"]
    server.noise = 5 * kernel_noise(policy, tokens)
    with pytest.raises(ServedWeightsDiffer):
        check.require(VERSION, "After step 300")


def test_more_than_noise_before_any_update_is_refused(model: str) -> None:
    _, _, check = started(model, noise=4.2e-4)
    with pytest.raises(ServedWeightsDiffer, match="not started with the trainer's --model"):
        check.require(START, "At the start")


def test_a_run_that_goes_on_takes_no_difference_for_noise(model: str) -> None:
    _, _, check = started(model, noise=1.5e-3, bound=Bound(floor=1e-3))
    with pytest.raises(ServedWeightsDiffer, match=r"tolerance 0\.001"):
        check.require(START, "At the start")
    check.bound = Bound(floor=1e-3, noise=1e-3)
    check.require(START, "At the start")
    assert check.bound.noise == 1e-3


def test_small_updates_that_are_absent_add_up(model: str) -> None:
    """Each update is within bfloat16's tolerance of 0.05."""
    policy, server, check = started(model, torch.bfloat16, noise=0.003)
    optimizer = optimizer_of(policy, lr=3e-4)
    check.require(START, "At the start")
    last, off = 40, 0.0
    with suppress(ServedWeightsDiffer):
        for step in range(1, 100):
            move(policy, optimizer, step)
            server.swap(policy if step <= last else server.model, PolicyVersion(1, step))
            off = copy.copy(check).measure().mean
            check.require(PolicyVersion(1, step), f"After step {step}")
    assert last < step < 99
    assert off < 0.03


def test_the_tokens_that_are_compared_are_ones_that_the_policy_samples() -> None:
    """Noise of tokens that the policy would never sample does not matter for training."""
    policy = qwen(tie_word_embeddings=False)
    random_state = torch.random.get_rng_state()
    tokens = sampled_tokens(policy)
    assert tokens == sampled_tokens(policy)
    assert torch.equal(torch.random.get_rng_state(), random_state)
    likely, unlikely = (logprobs_of(policy, t).mean() for t in (tokens, probe_tokens(VOCABULARY)))
    assert likely > unlikely + 2
