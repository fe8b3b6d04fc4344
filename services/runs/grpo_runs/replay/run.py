"""A recorded run: its options, its checkpoints, a learner with its weights, and its steps."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from grpo_core.provenance.batches import BATCHES, RecordedBatch, read_batch
from grpo_core.provenance.chain import Provenance
from grpo_core.provenance.digest import file_digest
from grpo_core.provenance.records import Publication, Start
from grpo_core.rollouts.files import file_of_step, steps_in
from grpo_core.settings import OptionsInvalid, parsed
from grpo_core.tree.objectives import Objective
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.tree.trainer_command import CommandLine
from grpo_trainer.advantages import with_advantages
from grpo_trainer.checkpoint import resume
from grpo_trainer.checkpoint.store import RngState, SavedState, StateStore
from grpo_trainer.data.collate import collate
from grpo_trainer.data.groups import sequences_of
from grpo_trainer.errors import NotReplayable
from grpo_trainer.learner import GradientStats, Learner, build_learner
from grpo_trainer.model.loading import TrainedWeights, device_to_load_on
from grpo_trainer.model.policy import limits_of
from grpo_trainer.optim.digests import digests_of
from grpo_trainer.optim.loss_scale import ScaleRecord
from grpo_trainer.ranks import ALONE


@dataclass(frozen=True)
class RecordedRun:
    """Steps are counted from 1."""

    provenance: Provenance

    @property
    def batches(self) -> Path:
        return self.provenance.save_path / BATCHES

    def published(self, step: int) -> Publication:
        """Raises `NotReplayable`: it is not recorded."""
        found = self.provenance.by_taken_step.get(step)
        if found is None:
            raise NotReplayable(
                f"{self.provenance.save_path} records no step {step}; {_known(self.provenance)}"
            )
        return found

    def start_of(self, step: int) -> Start:
        """The start of the trainer that took the step. Raises as `published`."""
        return self.provenance.start_of(self.published(step))

    def batch(self, step: int) -> RecordedBatch:
        """Raises `NotReplayable`: it is not there, or not the one that the step was taken on, or
        lacks the random numbers of other ranks."""
        file, digest = file_of_step(self.batches, step), self.published(step).batch
        if file.is_file():
            if digest is not None and file_digest(file) != digest:
                raise NotReplayable(
                    f"{file} is not the batch of step {step}: its content has changed since the "
                    "step (data). Restore the file, or choose a step that does not need it"
                )
            found, ranks = read_batch(self.batches, step), self.start_of(step).machine.ranks
            if found.step.random is not None and ranks > 1:
                raise NotReplayable(
                    f"{ranks} trainer processes took step {step} with --lora-dropout, and {file} "
                    "has the random numbers of the first alone. Only such steps of one process can "
                    "be replayed"
                )
            return found
        have = steps_in(self.batches) if self.batches.is_dir() else []
        if not have:
            raise NotReplayable(
                f"{self.batches} has no batch, so nothing can be replayed; the trainer writes them "
                "with --keep-rollouts above 0"
            )
        raise NotReplayable(
            f"{self.batches} has no batch of step {step}, only of steps {have[0]} to {have[-1]}; "
            "choose a later step, or raise --keep-rollouts in the next run"
        )

    def checkpoint_before(self, step: int) -> SavedState | None:
        """The newest checkpoint that lacks the step; None if there is none."""
        states = StateStore(self.provenance.save_path).all()
        found = [saved for saved in states if saved.record.step < step]
        return found[-1] if found else None

    def learner_at(self, saved: SavedState | None, step: int) -> Learner:
        """A learner with the weights of a checkpoint, or those of the model's files; for the steps
        up to `step`.

        Raises:
            NotReplayable: no checkpoint is old enough, and the run did not begin with the model.
            DamagedState, StateMismatch: the checkpoint cannot be loaded.
        """
        if saved is not None:
            learner = self.learner_of(saved.record.step + 1)
            resume.require_fit(saved.record, learner.policy, learner.settings, str(saved.directory))
            saved.load(learner.policy, learner.optimizer)
            learner.optimizer.write_into_parameters()
            return learner
        first = next(iter(self.provenance.publications))
        if first.version.step:
            raise NotReplayable(
                f"{self.provenance.save_path} has no checkpoint before step {step}, and the run "
                f"began at step {first.version.step} with a checkpoint of another directory; "
                "choose a later step"
            )
        return self.learner_of(1)

    def learner_of(self, step: int) -> Learner:
        """A learner with the options of a step, and the weights of the model's files."""
        start = self.start_of(step)
        settings = settings_of(start, self.provenance.save_path)
        torch.manual_seed(settings.seed)
        weights = TrainedWeights(settings.model, settings.lora)
        device = device_to_load_on(settings.device)
        policy = weights.load(getattr(torch, start.dtype), device).eval()
        return build_learner(policy, settings, ALONE)

    def continued(self, learner: Learner, step: int) -> Learner:
        """The learner for a step. Another one, with the same weights, if the run was resumed with
        other options before this step."""
        if settings_of(self.start_of(step), self.provenance.save_path) == learner.settings:
            return learner
        other = self.learner_of(step)
        other.optimizer.load_tensors(other.names, learner.optimizer.tensors(learner.names))
        other.optimizer.write_into_parameters()
        return other


def changed_settings(settings: TrainerSettings, options: Mapping[str, Any]) -> TrainerSettings:
    """Raises `OptionsInvalid`: the options exclude each other, or those of the run."""
    changed = settings.model_copy(update=options)
    problems = [
        f"--{(mistake.field or '').replace('_', '-')}: {mistake.message}"
        for mistake in changed.objective_conflicts()
    ]
    if problems:
        raise OptionsInvalid(problems)
    return changed


def settings_of(start: Start, save_path: Path) -> TrainerSettings:
    """Those that the trainer had, for one process with the whole state."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(start.config)
        file.flush()
        line = parsed(CommandLine, ["--config", file.name, "--no-fsdp"], {})
    return line.settings().model_copy(update={"save_path": save_path})


def _known(provenance: Provenance) -> str:
    steps = [
        line.version.step
        for line in provenance.publications
        if line.batch_id is not None and not line.lost
    ]
    return f"it has steps {min(steps)} to {max(steps)}" if steps else "it has no step at all"


@dataclass(frozen=True)
class ReplayedStep:
    """A step as recorded, and as computed again. `recorded`: the publication with its weights;
    `digests`: empty if none are recorded"""

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
        recorded = (then.loss, then.grad_norm, then.digests)
        return (self.loss, self.norm, tuple(self.digests)) == recorded


def taken(run: RecordedRun, learner: Learner, step: int, stats: GradientStats) -> ReplayedStep:
    """Update the weights with the gradients that were computed."""
    published = run.published(step)
    learner.optimizer.step(step - 1)
    learner.optimizer.write_into_parameters()
    parts = run.start_of(step).parts
    digests = digests_of(learner.optimizer.masters, parts) if published.digests else ()
    return ReplayedStep(published, stats.loss, stats.norm, digests)


def accumulate_recorded(
    learner: Learner, recorded: RecordedBatch, given: Sequence[str] = ()
) -> GradientStats:
    """Compute the gradients of a batch, which the optimizer collects.

    Args: given: options of another objective than the run's, by field
    """
    inputs = recorded.step
    objective = _objective(learner, recorded, given)
    settings, cut = learner.settings, learner.forward.layout.cut
    sequences = sequences_of(recorded.groups, limits_of(learner.policy, settings))
    batch = collate(sequences, settings.seq_len, settings.micro_batch_tokens, cut, objective)
    batch = with_advantages(learner.with_reference(batch), objective, learner.ranks)
    scale = learner.optimizer.loss_scale
    if scale is not None and inputs.loss_scale is not None:
        scale.record = ScaleRecord.model_validate(inputs.loss_scale)
    if inputs.random is not None:
        RngState.model_validate(inputs.random).restore()
    return learner.accumulate(batch, objective, inputs.step - 1)


def _objective(learner: Learner, recorded: RecordedBatch, given: Sequence[str]) -> Objective:
    """With the coefficients of the recorded step, unless the given options decide them."""
    found, inputs = learner.settings.resolved_objective, recorded.step
    if "kl_coef" not in given:
        found = replace(found, kl_coef=inputs.kl_coef)
    if not {"objective", "advantage", "maxent_tau"} & {*given}:
        found = replace(found, maxent_tau=inputs.maxent_tau)
    return found
