"""The proof of a publication, held against a server that computes with real weights and errs.

Its prefix cache is one of keys and values, as vLLM's: whole blocks, kept across a swap where the
fault says so.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_core.inference_client import Completion
from grpo_core.wire import PolicyVersion
from grpo_trainer.alignment import logprobs_of
from grpo_trainer.errors import ServedWeightsDiffer
from grpo_trainer.optimizer import MasterOptimizer
from grpo_trainer.trained_weights import Adapter, WholeModel
from grpo_trainer.weight_sync.served_proof import ProbeLengths, ServedProof
from tests.unit.trainer.tiny_policy import LORA, model_directory, move, optimizer_of

BLOCK = 16
UNTRAINED = PolicyVersion(0, 0)
VERSIONS = [PolicyVersion(1, step) for step in range(4)]


@dataclass
class StandIn:
    """Serves `model` under `version`."""

    model: Any
    version: PolicyVersion = UNTRAINED
    blocks: dict[tuple[int, ...], Any] = field(default_factory=dict)

    def swap(self, model: Any, version: PolicyVersion, keep_cache: bool = False) -> None:
        self.model, self.version = copy.deepcopy(model), version
        if not keep_cache:
            self.blocks.clear()

    def served_logprobs(self, token_ids: list[int]) -> list[float]:
        """Without the cache, as vLLM computes log-probabilities of prompts."""
        return logprobs_of(self.model, token_ids).tolist()

    @torch.no_grad()
    def sample(self, prompt_token_ids: list[int], max_tokens: int) -> Completion:
        known = tuple(prompt_token_ids[: (len(prompt_token_ids) - 1) // BLOCK * BLOCK])
        if known and known not in self.blocks:
            self.blocks[known] = self.model(torch.tensor([known]), use_cache=True).past_key_values
        past = copy.deepcopy(self.blocks.get(known))
        tokens, logprobs = [], []
        new = prompt_token_ids[len(known) :]
        for _ in range(max_tokens):
            out = self.model(torch.tensor([new]), past_key_values=past, use_cache=True)
            past, logp = out.past_key_values, out.logits[0, -1].float().log_softmax(-1)
            token = int(torch.multinomial(logp.exp(), 1))
            tokens.append(token)
            logprobs.append(float(logp[token]))
            new = [token]
        return Completion("", "length", tokens, logprobs, self.version, self.version)


@dataclass
class Run:
    """A trainer of a tiny model, two publications into its run."""

    policy: Any
    optimizer: MasterOptimizer
    server: StandIn
    proof: ServedProof
    before: Any

    @classmethod
    def of(cls, policy: Any) -> Run:
        server = StandIn(copy.deepcopy(policy))
        proof = ServedProof(policy, server, ProbeLengths.fitting(BLOCK, 256))
        run = cls(policy, optimizer_of(policy), server, proof, before=None)
        for step in (0, 1):
            run.publish(step)
        return run

    def publish(self, step: int) -> None:
        self.before = copy.deepcopy(self.policy)
        move(self.policy, self.optimizer, step)
        self.proof.prime()
        self.server.swap(self.policy, VERSIONS[step + 1])
        self.proof.require(VERSIONS[step + 1], "After step")

    def update(self) -> None:
        """What is about to be published as the third version."""
        self.before = copy.deepcopy(self.policy)
        move(self.policy, self.optimizer, 2)
        self.proof.prime()

    def refusal(self) -> str:
        with pytest.raises(ServedWeightsDiffer) as told:
            self.proof.require(VERSIONS[3], "After step 3")
        return str(told.value)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(params=["adapter", "whole model"])
def run(request: pytest.FixtureRequest, model: Path) -> Run:
    torch.manual_seed(1)
    weights = Adapter(str(model), LORA) if request.param == "adapter" else WholeModel(str(model))
    return Run.of(weights.load(torch.float32).eval())


def test_honest_publications_pass_and_say_how_close_they_are(run: Run) -> None:
    run.update()
    run.server.swap(run.policy, VERSIONS[3])
    found = run.proof.require(VERSIONS[3], "After step 3")
    assert found.mean < 1e-5
    assert found.sampled_mean is not None
    assert found.sampled_mean < 1e-5
    assert found.moved > 0.01


def test_the_untrained_model_is_served(run: Run, model: Path) -> None:
    run.update()
    run.server.swap(WholeModel(str(model)).load(torch.float32).eval(), VERSIONS[3])
    assert "it serves the model that it was started with" in run.refusal()


def test_the_weights_of_the_publication_before_are_served(run: Run) -> None:
    run.update()
    run.server.swap(run.before, VERSIONS[3])
    assert "it still serves the weights of the publication before" in run.refusal()


@pytest.mark.parametrize("base_is_served", [False, True])
def test_an_update_below_the_tolerance_of_its_data_type(base_is_served: bool, model: Path) -> None:
    """Of bfloat16: noise is 0.003, the tolerance 0.05, and these updates, which move it by 0.021
    and 0.012, lie in between."""
    torch.manual_seed(1)
    policy = WholeModel(str(model)).load(torch.bfloat16).eval()
    base, server = copy.deepcopy(policy), StandIn(copy.deepcopy(policy))
    proof = ServedProof(policy, server, ProbeLengths.fitting(BLOCK, 256))
    optimizer = optimizer_of(policy, lr=0.0015)
    for step in range(2):
        before = copy.deepcopy(policy)
        move(policy, optimizer, step)
        server.swap(policy, VERSIONS[step])
        assert 0.003 < proof.require(VERSIONS[step], "After step").moved < 0.05
    before = copy.deepcopy(policy)
    move(policy, optimizer, 2)
    server.swap(base if base_is_served else before, VERSIONS[2])
    cause = "was started with, without" if base_is_served else "publication before"
    with pytest.raises(ServedWeightsDiffer, match=cause):
        proof.require(VERSIONS[2], "After step 2")


def test_weights_of_another_run_are_served(run: Run) -> None:
    run.update()
    other = copy.deepcopy(run.before)
    optimizer = optimizer_of(other)
    for step in (7, 8):
        move(other, optimizer, step)
    run.server.swap(other, VERSIONS[3])
    assert "it serves weights of another run" in run.refusal()


def test_keys_and_values_that_outlive_the_swap(run: Run) -> None:
    """What is computed afresh agrees to the last digits: only the sampled part can tell. The cache
    had forgotten the prompt since the proof before."""
    run.server.blocks.clear()
    run.update()
    run.server.swap(run.policy, VERSIONS[3], keep_cache=True)
    told = run.refusal()
    assert "are still in its KV cache" in told
    assert "fixed tokens differ" not in told


def test_an_answer_under_another_name(run: Run) -> None:
    run.update()
    run.server.swap(run.policy, PolicyVersion(2, 0))
    assert "the server's answer names (2, 0)" in run.refusal()


@pytest.mark.parametrize(
    ("block", "longest", "expected"),
    [
        (16, 512, ProbeLengths(32, 17, 16)),
        (128, 512, ProbeLengths(32, 129, 16)),
        (128, 100, ProbeLengths(32, 84, 16)),
        (16, 20, ProbeLengths(19, 10, 10)),
        (None, None, ProbeLengths(32, 17, 16)),
    ],
)
def test_requests_fit_the_server(
    block: int | None, longest: int | None, expected: ProbeLengths
) -> None:
    assert ProbeLengths.fitting(block, longest) == expected
    assert longest is None or expected.prompt + expected.sampled <= longest
