"""The proof of a publication finds every way in which a server may serve other weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from grpo_core.wire import PolicyVersion
from grpo_trainer.errors import ServedWeightsDiffer
from grpo_trainer.optimizer import MasterOptimizer
from grpo_trainer.trained_weights import Adapter, WholeModel
from grpo_trainer.weight_sync.served_proof import ProbeLengths, ServedProof
from tests.unit.trainer.served_model import BLOCK, ServedModel
from tests.unit.trainer.tiny_policy import LORA, model_directory, move, optimizer_of

VERSION = PolicyVersion(1, 3)


@dataclass
class Run:
    """A trainer of a tiny model, about to publish for the third time."""

    policy: Any
    base: Any
    optimizer: MasterOptimizer
    server: ServedModel
    proof: ServedProof
    previous: Any = None

    @classmethod
    def of(cls, policy: Any, lr: float = 0.05) -> Run:
        base, server = copy.deepcopy(policy), ServedModel(copy.deepcopy(policy))
        proof = ServedProof(policy, server, ProbeLengths.fitting(BLOCK, 256))
        run = cls(policy, base, optimizer_of(policy, lr), server, proof)
        for step in (0, 1):
            run.update(step)
            server.swap(policy, PolicyVersion(1, step + 1))
            proof.require(PolicyVersion(1, step + 1), "After step")
        run.update(2)
        return run

    def update(self, step: int) -> None:
        self.previous = copy.deepcopy(self.policy)
        move(self.policy, self.optimizer, step)
        self.proof.prime()

    def keep_cache(self) -> None:
        """Only the sampled part can find it: the fixed tokens are computed afresh."""
        self.server.blocks.clear()  # the server had forgotten the prompt since the last proof
        self.server.swap(self.previous, VERSION)
        self.proof.prime()
        self.server.swap(self.policy, VERSION, keep_cache=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(model_directory(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="module", params=["adapter", "whole model"])
def run(request: pytest.FixtureRequest, model: str) -> Run:
    torch.manual_seed(1)
    weights = Adapter(model, LORA) if request.param == "adapter" else WholeModel(model)
    return Run.of(weights.load(torch.float32).eval())


@pytest.mark.parametrize(
    ("serve", "told"),
    [
        (lambda r: r.server.swap(r.base, VERSION), "the model that it was started with"),
        (lambda r: r.server.swap(r.previous, VERSION), "the weights of the publication before"),
        (lambda r: r.server.swap(r.policy, PolicyVersion(2, 0)), r"server's answer names \(2, 0\)"),
        (Run.keep_cache, r"afresh agrees .* are still in its KV cache"),
    ],
    ids=["base", "previous", "another version", "kept keys and values"],
)
def test_other_weights_are_refused_with_the_likely_cause(
    serve: Callable[[Run], None], told: str, run: Run
) -> None:
    serve(run)
    with pytest.raises(ServedWeightsDiffer, match=told):
        run.proof.require(VERSION, "After step 3")


def test_the_published_weights_pass_with_the_distance_that_they_moved(run: Run) -> None:
    run.server.swap(run.policy, VERSION)
    proof = copy.copy(run.proof)  # one that passes remembers these weights as the previous ones
    found = proof.require(VERSION, "After step 3")
    assert found.mean < 1e-5
    assert found.sampled_mean is not None
    assert found.sampled_mean < 1e-5
    assert found.moved > 0.01


@pytest.mark.parametrize("served", ["base", "previous"])
def test_an_update_below_the_tolerance_of_its_data_type_is_missed_if_absent(
    served: str, model: str
) -> None:
    """Of bfloat16: noise is 0.003, the tolerance 0.05, and these updates move it by 0.021 and
    0.012."""
    torch.manual_seed(1)
    run = Run.of(WholeModel(model).load(torch.bfloat16).eval(), lr=0.0015)
    run.server.swap({"base": run.base, "previous": run.previous}[served], VERSION)
    cause = {"base": "was started with, without", "previous": "publication before"}[served]
    with pytest.raises(ServedWeightsDiffer, match=cause):
        run.proof.require(VERSION, "After step 3")
    run.server.swap(run.policy, VERSION)
    assert 0.003 < run.proof.require(VERSION, "After step 3").moved < 0.05
