"""The training loop: take → advantages → gradients and checks → step → publish → record and save.

Every rank runs it: rank 0 as `Lead`, the others as `OtherRank`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from grpo_core.clients.run_api import TrainerClient
from grpo_core.security import plain
from grpo_core.tree.trainer import TrainerSettings
from grpo_trainer.advantages import with_advantages
from grpo_trainer.checks.self_test import SelfTest, require_own_functions
from grpo_trainer.data.batches import BatchQueue, Position
from grpo_trainer.errors import NonFiniteStep
from grpo_trainer.ranks import ALONE, Ranks
from grpo_trainer.roles import Lead, OpenSync, Role, open_lead, open_other_rank
from grpo_trainer.stop import Stop
from grpo_trainer.telemetry.provenance import step_input
from grpo_trainer.weight_sync.build import open_weight_sync


def train(settings: TrainerSettings, ranks: Ranks = ALONE, stop: Stop | None = None) -> None:
    """Train up to step `settings.steps`, from a checkpoint if there is one, and save the
    final model. A stop between two steps saves a checkpoint.

    Args:
        ranks: this process among the trainer's processes
        stop: listens to signals

    Raises:
        GrpoError: any of the named errors. The server keeps serving in every case.
        SystemExit: a stop signal arrived.
    """
    stop = stop or Stop()
    token = plain(settings.run_api_token)
    with (
        TrainerClient(settings.run_api_url, settings.service_deadline_s, token) as api,
        open_run(settings, api, open_weight_sync, ranks) as opened,
    ):
        if opened is None:
            return
        role, position = opened
        stop.follows = not ranks.leads
        try:
            for _ in training_steps(role, position, stop):
                pass
        except SystemExit:
            if isinstance(role, Lead) and stop.defers and not stop.in_step:
                role.stop()
            raise
        if isinstance(role, Lead) and settings.benchmark:
            role.recorder.report_times()


def training_steps(role: Role, position: Position, stop: Stop) -> Iterator[Position]:
    """The training loop. Yields the position after each step. Batches that cannot be trained on are
    skipped.

    Args:
        position: the steps taken so far; its epoch and step are the served policy version
        stop: defers a signal during a step to the step's end
    """
    learner = role.learner
    while position.step < learner.settings.steps:
        batch = role.take(position)
        with stop.deferred():
            objective = role.agree_on_objective()
            batch = learner.with_reference(batch)
            batch = with_advantages(batch, objective, learner.ranks)
            # Before the gradients, which draw random numbers and may change the loss scale.
            inputs = step_input(learner, objective, position.step, batch.batch_id)
            try:
                meanwhile = role.meanwhile(batch, position)
                stats = learner.accumulate(batch, objective, position.step, meanwhile)
            except NonFiniteStep as error:
                position = role.reject(batch, position, error)
                continue
            role.finish_digests()  # of the master weights, which the next line changes
            learner.optimizer.step(position.step)
            learner.digests.begin()
            published = role.publish(position)
            position = role.finish(position, batch, objective, inputs, stats, published)
        yield position


@contextlib.contextmanager
def open_run(
    settings: TrainerSettings,
    api: BatchQueue,
    weight_sync: OpenSync,
    ranks: Ranks = ALONE,
) -> Iterator[tuple[Role, Position] | None]:
    """Load, restore, serve, check. Gives what the loop needs; None if the run is complete already.

    Args:
        api: where batches come from
        weight_sync: opens the object that brings weights to the server
        ranks: this process among the trainer's processes
    """
    require_own_functions(settings.resolved_objective)
    torch.manual_seed(settings.seed)
    with contextlib.ExitStack() as stack:
        opened: tuple[Role, Position] | None = (
            open_lead(stack, settings, ranks, api, weight_sync)
            if ranks.leads
            else open_other_rank(stack, settings, ranks)
        )
        if opened is not None:
            SelfTest(opened[0].learner).require()
            opened[0].learner.orders.begin()
        yield opened
        if opened is not None:
            opened[0].leave()
