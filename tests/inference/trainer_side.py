"""Runs the trainer's side of weight sharing step by step in a test process."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_core.clients.inference import BridgeClient
from grpo_core.weights.socket import connect_weights
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.checks.served_weights import Alignment, PublicationCheck
from grpo_trainer.model.logprobs import probe_tokens
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.weight_sync.attachment import ServerConnection
from grpo_trainer.weight_sync.base import Published
from grpo_trainer.weight_sync.shared import SharedVllm
from grpo_trainer.weight_sync.shared_memory import map_weights
from tests.fixtures.inference import LEASE_S, START_DEADLINE_S, InferenceServer
from tests.inference.request_load import (
    posted_in_background,
    unfinished_sequences,
    wait_until_running,
)
from tests.support.wait import wait_for

LR = 1e-2
"""Large, so that every step moves the logprobs far beyond any tolerance."""
FLIGHTS, FLIGHT_TOKENS = 8, 250


@dataclass
class AttachedTrainer:
    sync: SharedVllm
    policy: Any
    optimizer: MasterOptimizer
    bridge: BridgeClient
    check: PublicationCheck

    def alignment(self) -> Alignment:
        return self.check.measure()

    @property
    def tokens(self) -> list[int]:
        return probe_tokens(self.policy.config.vocab_size)

    def step(self, step: int) -> Published:
        self.gather_gradient(step)
        self.optimizer.step(step)
        return self.sync.publish(self.optimizer, step + 1)

    def gather_gradient(self, step: int) -> None:
        """From a supervised loss on random tokens, because any gradient is sufficient."""
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(self.policy.config.vocab_size, (4, 40), generator=generator)
        ids = ids.to(self.sync.weights.device)
        self.policy(ids, labels=ids).loss.backward()


@dataclass(frozen=True)
class UpdateInFlight:
    """One update of the weights during FLIGHTS completions. `reply`: the answer of `/generate`."""

    old_policy: Any
    before: PolicyVersion
    after: PolicyVersion
    reply: Any


def update_in_flight(
    server: InferenceServer, trainer: AttachedTrainer, prompt: list[int]
) -> UpdateInFlight:
    """Take one step while completions are sampled. Repeat it if a completion ended before the step,
    as can happen on a busy machine."""
    return wait_for(
        lambda: _attempt_in_flight(server, trainer, prompt),
        lambda u: u is not None,
        START_DEADLINE_S,
    )


def _attempt_in_flight(
    server: InferenceServer, trainer: AttachedTrainer, prompt: list[int]
) -> UpdateInFlight | None:
    before = PolicyVersion(*trainer.bridge.info().policy_version)
    trainer.gather_gradient(before.step)
    old_policy = copy.deepcopy(trainer.policy)
    body: dict[str, object] = {
        **{"prompt": {"prompt_token_ids": prompt}, "n": FLIGHTS, "max_tokens": FLIGHT_TOKENS},
        **{"ignore_eos": True, "logprobs": 0},
    }
    with posted_in_background(server.url, body) as request:
        began = wait_until_running(server, FLIGHTS, request)
        trainer.optimizer.step(before.step)
        after = trainer.sync.publish(trainer.optimizer, before.step + 1).version
        went_on = unfinished_sequences(server) == FLIGHTS
        reply = request.result()
    return UpdateInFlight(old_policy, before, after, reply) if began and went_on else None


def next_epoch(server: InferenceServer) -> PolicyVersion:
    with BridgeClient(server.url) as bridge:
        return PolicyVersion(bridge.info().policy_version[0] + 1, 0)


def write_weights(
    server: InferenceServer,
    version: PolicyVersion,
    weights: Sequence[Tensor] | None = None,
    noise: float = 0.0,
) -> list[Tensor]:
    """Publish `weights`, or the served weights, plus noise with this standard deviation.

    Returns:
        A copy of every parameter's values; tied parameters appear once.
    """
    with BridgeClient(server.url) as bridge, connect_weights(server.socket) as connection:
        mapped = map_weights(connection)
        regions = {r.offset: r for r in mapped.manifest.parameters.values()}
        views = [mapped.view(region) for region in regions.values()]
        session = connection.grant.session
        bridge.pause(session, LEASE_S, version)
        generator = torch.Generator().manual_seed(0)
        for view, values in zip(views, weights or views, strict=True):
            view.copy_(values + noise * torch.randn(view.shape, generator=generator).to(view))
        mapped.wait_until_written()
        bridge.resume(session, written=True)
        return [view.clone() for view in views]


@contextmanager
def attached_trainer(server: InferenceServer, lr: float = LR) -> Iterator[AttachedTrainer]:
    """Attach and start a new epoch. At the end write the original weights back."""
    bridge = BridgeClient(server.url, control_url=server.control_url)
    sync = SharedVllm(ServerConnection(bridge), str(server.model), lease_s=LEASE_S)
    policy = sync.load_policy().eval()
    optimizer = MasterOptimizer(policy.parameters(), lambda _: lr, 0.0, 1.0)
    found = [master.detach().clone() for master in optimizer.masters]
    sync.start(optimizer, step=0)
    try:
        yield AttachedTrainer(sync, policy, optimizer, bridge, PublicationCheck(policy, sync))
    finally:
        if sync._server._attachment is not None:
            with torch.no_grad():
                for master, value in zip(optimizer.masters, found, strict=True):
                    master.copy_(value)
            sync.start(optimizer, step=10_000)
        sync.close()
