"""The trainer's half of weight sharing, driven by hand in a test process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from grpo_core.inference_client import BridgeClient
from grpo_core.wire import PolicyVersion
from grpo_trainer.alignment import Alignment, AlignmentProbe, probe_tokens
from grpo_trainer.optimizer import MasterOptimizer
from grpo_trainer.weight_sync.base import Published
from grpo_trainer.weight_sync.shared_vllm import SharedVllm
from tests.fixtures.inference import InferenceServer
from tests.inference.engine_load import all_run, posted_in_background, unfinished_requests

LR = 1e-2
"""Large, so that every step moves the log-probabilities far beyond any tolerance."""
FLIGHTS, FLIGHT_TOKENS = 16, 400


@dataclass
class AttachedTrainer:
    sync: SharedVllm
    policy: Any
    optimizer: MasterOptimizer
    bridge: BridgeClient
    probe: AlignmentProbe

    def alignment(self) -> Alignment:
        return self.probe.measure(self.sync.served_logprobs)

    @property
    def tokens(self) -> list[int]:
        return probe_tokens(self.policy.config.vocab_size)

    def step(self, step: int) -> Published:
        """One whole update."""
        self.gather_gradient(step)
        return self.sync.apply(self.optimizer, step)

    def gather_gradient(self, step: int) -> None:
        """Of a supervised loss on random tokens: any gradient will do."""
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(self.policy.config.vocab_size, (4, 40), generator=generator)
        ids = ids.to(self.sync.weights.device)
        self.policy(ids, labels=ids).loss.backward()


@dataclass(frozen=True)
class UpdateInFlight:
    """Of the weights during 16 completions. `reply`: the whole answer of `/generate`"""

    old_policy: Any
    before: PolicyVersion
    after: PolicyVersion
    reply: Any


def update_in_flight(
    server: InferenceServer, trainer: AttachedTrainer, prompt: list[int]
) -> UpdateInFlight | None:
    """One step of the trainer, once each completion has begun. None where one of them had not, or
    had ended before the server went on."""
    before = PolicyVersion(*trainer.bridge.info().policy_version)
    trainer.gather_gradient(before.step)
    old_policy = copy.deepcopy(trainer.policy)
    body: dict[str, object] = {
        **{"prompt": {"prompt_token_ids": prompt}, "n": FLIGHTS, "max_tokens": FLIGHT_TOKENS},
        **{"ignore_eos": True, "logprobs": 0},
    }
    with posted_in_background(server.url, body) as posted:
        began = all_run(server, FLIGHTS, posted.has_ended)
        after = trainer.sync.apply(trainer.optimizer, before.step).version
        went_on = unfinished_requests(server) == FLIGHTS
        reply = posted.answer()
    return UpdateInFlight(old_policy, before, after, reply) if began and went_on else None


@contextmanager
def attached_trainer(server: InferenceServer, lr: float = LR) -> Iterator[AttachedTrainer]:
    """Attach, announce a new epoch, and write the weights back as they were found at the end."""
    bridge = BridgeClient(server.url, control_url=server.control_url)
    sync = SharedVllm(bridge, str(server.model), None, dtype="auto", lease_s=30.0)
    policy = sync.load_policy().eval()
    optimizer = MasterOptimizer(policy.parameters(), lr, 0, 0.0, 1.0)
    found = [master.detach().clone() for master in optimizer.masters]
    sync.start(optimizer, step=0)
    try:
        yield AttachedTrainer(sync, policy, optimizer, bridge, AlignmentProbe(policy))
    finally:
        if sync.attached:
            with torch.no_grad():
                for master, value in zip(optimizer.masters, found, strict=True):
                    master.copy_(value)
            sync.start(optimizer, step=10_000)
        sync.close()
