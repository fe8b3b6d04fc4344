"""Takes recorded steps again, with the code of the training loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from grpo_core.provenance.batches import RecordedBatch
from grpo_core.provenance.records import Publication
from grpo_core.tree.objectives import Objective
from grpo_runs.replay.run import RecordedRun
from grpo_trainer.checkpoint.store import RngState
from grpo_trainer.data.collate import Batch, collate
from grpo_trainer.data.groups import UsableGroup, usable_group
from grpo_trainer.learner import GradientStats, Learner
from grpo_trainer.model.policy import limits_of
from grpo_trainer.optim.loss_scale import ScaleRecord
from grpo_trainer.weight_digests import digests_of


@dataclass(frozen=True)
class ReplayedStep:
    """A step as recorded, and as computed again. `recorded`: the publication with its weights"""

    recorded: Publication
    loss: float
    norm: float
    digests: Sequence[str]

    @property
    def step(self) -> int:
        return self.recorded.version.step

    @property
    def is_equal(self) -> bool:
        """Bit by bit."""
        then = self.recorded
        return (self.loss, self.norm, tuple(self.digests)) == (
            then.loss,
            then.grad_norm,
            then.digests,
        )


def replayed_steps(
    run: RecordedRun, learner: Learner, begin: int, end: int
) -> Iterator[ReplayedStep]:
    """Take the steps after `begin`, up to `end`. Raises the errors of `Learner.gradients`."""
    for step in range(begin + 1, end + 1):
        learner = run.continued(learner, step)
        recorded = run.batch(step)
        gradients = gradients_of(learner, recorded)
        yield taken(run, learner, step, gradients)


def taken(run: RecordedRun, learner: Learner, step: int, gradients: GradientStats) -> ReplayedStep:
    """Update the weights with the gradients that were computed."""
    published = run.published(step)
    learner.optimizer.step(step - 1)
    learner.optimizer.write_into_parameters()
    return ReplayedStep(
        published,
        gradients.loss,
        gradients.norm,
        digests_of(learner.optimizer.masters, run.start_of(step).parts),
    )


def gradients_of(
    learner: Learner, recorded: RecordedBatch, given: Sequence[str] = ()
) -> GradientStats:
    """Compute the gradients of a batch, which the optimizer collects.

    Args: given: options of another objective than the run's, by field
    """
    inputs = recorded.step
    objective = _objective(learner, recorded, given)
    batch, groups = _collated(learner, recorded, objective)
    batch = learner.with_advantages(batch, groups, objective)
    scale = learner.optimizer.loss_scale
    if scale is not None and inputs.loss_scale is not None:
        scale.record = ScaleRecord.model_validate(inputs.loss_scale)
    if inputs.random is not None:
        RngState.model_validate(inputs.random).restore()
    return learner.gradients(batch, objective, inputs.step - 1)


def _objective(learner: Learner, recorded: RecordedBatch, given: Sequence[str]) -> Objective:
    """With the coefficients of the recorded step, unless the given options decide them."""
    found, inputs = learner.settings.resolved_objective, recorded.step
    if "kl_coef" not in given:
        found = replace(found, kl_coef=inputs.kl_coef)
    if not {"objective", "advantage", "maxent_tau"} & {*given}:
        found = replace(found, maxent_tau=inputs.maxent_tau)
    return found


def _collated(
    learner: Learner, recorded: RecordedBatch, objective: Objective
) -> tuple[Batch, list[UsableGroup]]:
    settings = learner.settings
    limits = limits_of(learner.policy, settings)
    groups = [usable_group(i, group, limits) for i, group in enumerate(recorded.groups)]
    cut = learner.forward.layout.cut
    return (
        collate(groups, settings.seq_len, settings.micro_batch_tokens, cut, objective),
        groups,
    )
