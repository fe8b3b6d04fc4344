"""Records where the weights come from: `provenance.jsonl`, and the batch of each step.

A version without digests (see `WeightDigests`) is recorded once more, with them, if it is saved.

A thread writes the batch while the next step's gradients are computed, and the weights' digests;
all are finished before the next update and before a checkpoint. A batch that cannot be written
never ends the run.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch

from grpo_core.protocol import VERSION
from grpo_core.provenance.batches import BATCHES, RecordedBatch, StepInput, write_batch
from grpo_core.provenance.chain import Provenance
from grpo_core.provenance.digest import file_digest, root_of, source_digest
from grpo_core.provenance.records import (
    PROVENANCE,
    Code,
    Export,
    Line,
    Machine,
    Parent,
    Publication,
    Start,
    read_lines,
    resumed,
    text_of,
)
from grpo_core.tree.objectives import ADVANTAGES, LOSSES, Objective
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.tree.trainer_command import config_yaml
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.atomic_files import write_whole
from grpo_trainer.checkpoint.store import RngState, SavedState, shapes_of
from grpo_trainer.data.collate import Batch
from grpo_trainer.errors import CheckpointNotSaved
from grpo_trainer.functions import files_of
from grpo_trainer.learner import GradientStats, Learner
from grpo_trainer.model.adapter import adapter_dropouts
from grpo_trainer.model.policy import device_of
from grpo_trainer.optim.digests import facts_of
from grpo_trainer.telemetry.rollouts import prepare_steps
from grpo_trainer.telemetry.sinks import rotate_records
from grpo_trainer.weight_sync.base import Published

log = structlog.get_logger()


Build = Callable[[list[str] | None, str | None], Publication]
"""Args: the digests of the weights, if there are any, and that of the batch's file"""


class ProvenanceLog:
    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        settings = learner.settings
        self._path = settings.save_path / PROVENANCE
        self._batches = settings.save_path / BATCHES
        self._keep, self._seed = settings.keep_rollouts, settings.seed
        # of the whole master weights
        self._facts = facts_of(shapes_of(learner.policy), learner.optimizer.masters[0].dtype)
        self._parent: Parent | None = None
        self._due: Callable[[], None] | None = None
        self._later: Build | None = None
        self._batch: Future[str | None] | None = None
        self._written: Future[None] | None = None
        self._has_failed = False
        self._thread, self._appends = ThreadPoolExecutor(1, "provenance"), threading.Lock()

    def close(self) -> None:
        """Write what is due, and wait for the thread."""
        self.write()
        self._thread.shutdown()

    def start(
        self,
        served: PolicyVersion,
        saved: SavedState | None,
        recorded: int | None,
        run_uuid: str | None,
    ) -> None:
        """Record the start, and its weights, whose digests were begun.

        Args:
            served: the first version
            saved: the checkpoint from which the run resumes
            recorded: see `recorded_steps`

        Raises:
            CheckpointNotSaved: the file could not be written.
            BrokenProvenance: the file of the resumed run cannot be read.
        """
        lines: list[Line] = []
        if recorded is None:
            rotate_records(self._path)
        elif self._path.is_file():
            lines = resumed(read_lines(self._path), recorded)
            before = Provenance(self._path.parent, lines).by_step.get(recorded)
            if before is not None:
                self._parent = Parent(version=before.version, root=before.root)
        prepare_steps(self._batches, recorded, "--save-path")
        settings = self._learner.settings
        begun = Start(
            step=served.step,
            model=settings.model,
            run_uuid=run_uuid,
            checkpoint=None if saved is None else str(saved.directory),
            code=code_of(settings),
            machine=machine_of(self._learner),
            dtype=str(next(self._learner.policy.parameters()).dtype).removeprefix("torch."),
            tensors=tuple(self._facts),
            parts=self._learner.optimizer.parts,
            config=config_yaml(settings),
        )
        write_whole(self._path, "".join(map(text_of, [*lines, begun])))
        self._record(self._publication(served, self._learner.digests.finish_saved()))

    def step_taken(
        self,
        step_input: StepInput,
        batch: Batch,
        gradients: GradientStats,
        published: Published,
    ) -> None:
        """Record a publication, from the next call of `write` on."""
        self._due = partial(self._record_step, step_input, batch, gradients, published)

    def write(self) -> None:
        """Write what is due, in the thread. While this process launches the work of a GPU, the
        thread would take the interpreter from it."""
        if (due := self._due) is not None:
            self._due = None
            due()

    def _record_step(
        self,
        step_input: StepInput,
        batch: Batch,
        gradients: GradientStats,
        published: Published,
    ) -> None:
        """Record a publication once its digests, which were begun, and its batch are known."""
        recorded = RecordedBatch(step_input, [*batch.groups])
        self._batch = self._thread.submit(self._write_batch, recorded) if self._keep else None
        self._begin(
            lambda digests, digest: self._publication(
                published.version,
                digests,
                batch_id=batch.batch_id,
                batch=digest,
                loss=gradients.loss,
                grad_norm=gradients.norm,
                is_served=published.is_served,
            )
        )

    def finish(self) -> None:
        """Wait until the newest publication is written. The weights may change afterwards.

        Raises:
            CheckpointNotSaved: it could not be written.
        """
        self.write()
        if (build := self._later) is not None:
            digests, self._later = self._learner.digests.finish(), None
            self._written = self._thread.submit(self._write, build, lambda: digests)
        if (written := self._written) is not None:
            self._written = None
            written.result()

    def before_save(self) -> None:
        """As `finish`. The saved weights have digests afterwards."""
        self.finish()
        if (digests := self._learner.digests.finish_saved()) is not None:
            self._record(self._newest.model_copy(update=self._weights(digests)))

    def _begin(self, build: Build) -> None:
        """Write a publication as soon as its digests are known: a killed trainer should leave
        it."""
        digests = self._learner.digests
        if self._learner.optimizer.parts == 1:
            self._written = self._thread.submit(self._write, build, digests.finish)
        else:  # the ranks exchange theirs in the main thread
            self._later = build

    def _write(self, build: Build, digests: Callable[[], list[str] | None]) -> None:
        """In the thread, behind the batch."""
        found, batch = digests(), None if self._batch is None else self._batch.result()
        self._record(build(found, batch))

    def _record(self, line: Publication) -> None:
        self._append(line)
        self._newest = line
        self._parent = Parent(version=line.version, root=line.root)

    def exported(self, directory: Path, step: int) -> None:
        """Record an exported model, in the thread."""
        self._thread.submit(self._record_export, directory, step)

    def _publication(
        self, version: PolicyVersion, digests: list[str] | None, **fields: Any
    ) -> Publication:
        weights = {} if digests is None else self._weights(digests)
        return Publication(
            version=version, parent=self._parent, seed=self._seed, **weights, **fields
        )

    def _weights(self, digests: list[str]) -> dict[str, Any]:
        return {"root": root_of(self._facts, digests), "digests": tuple(digests)}

    def _write_batch(self, batch: RecordedBatch) -> str | None:
        try:
            found = file_digest(write_batch(self._batches, batch, self._keep))
            self._has_failed = False
            return found
        except OSError as error:
            if not self._has_failed:
                log.warning(
                    "batch.not_recorded",
                    step=batch.step.step,
                    reason=str(error),
                    hint="training continues, and the trainer tries again at each step; a step "
                    f"without its batch cannot be replayed; check {self._batches}",
                )
            self._has_failed = True
            return None

    def _record_export(self, directory: Path, step: int) -> None:
        with suppress(FileNotFoundError):  # removed meanwhile, as an old one
            files = {
                path.relative_to(directory).as_posix(): file_digest(path)
                for path in sorted(directory.rglob("*"))
                if path.is_file()
            }
            self._append(Export(step=step, directory=directory.name, files=files))

    def _append(self, line: Line) -> None:
        try:
            with self._appends, self._path.open("a", encoding="utf-8") as file:
                file.write(text_of(line))
        except OSError as error:
            raise CheckpointNotSaved(
                f"{self._path} could not be written: {error}; free disk space, then start the "
                "trainer again"
            ) from error


def recorded_steps(save_path: Path, saved: SavedState | None) -> int | None:
    """The steps of the checkpoint, which the records of the run have too. None for a new run, and
    if the records in `save_path` are those of another run than the checkpoint's.

    Raises:
        BrokenProvenance: `provenance.jsonl` cannot be read.
    """
    if saved is None:
        return None
    path = save_path / PROVENANCE
    runs = (
        {line.run_uuid for line in read_lines(path) if isinstance(line, Start)}
        if path.is_file()
        else set()
    )
    return None if runs and saved.record.run_uuid not in runs else saved.record.step


def step_input(learner: Learner, objective: Objective, step: int, batch_id: int) -> StepInput:
    """Call it right before the gradients of the step are computed. Args: step: steps taken"""
    scale = learner.optimizer.loss_scale
    draws = bool(adapter_dropouts(learner.policy))
    return StepInput(
        step=step + 1,
        batch_id=batch_id,
        kl_coef=objective.kl_coef,
        maxent_tau=objective.maxent_tau,
        loss_scale=None if scale is None else scale.record.model_dump(),
        random=RngState.capture().model_dump(mode="json") if draws else None,
    )


def code_of(settings: TrainerSettings) -> Code:
    """With the files of the user's loss and advantages. Raises `FunctionUnusable`."""
    objective = settings.resolved_objective
    pairs: Sequence[tuple[str, Any]] = ((objective.loss, LOSSES), (objective.advantage, ADVANTAGES))
    own = {path for chosen, named in pairs if chosen not in named for path in files_of(chosen)}
    return Code(
        version=VERSION,
        trainer=source_digest("grpo_trainer"),
        core=source_digest("grpo_core"),
        own={str(path): file_digest(path) for path in sorted(own)},
    )


def machine_of(learner: Learner) -> Machine:
    import transformers

    device = device_of(learner.policy)
    on_gpu = device.type == "cuda"
    return Machine(
        torch=torch.__version__,
        transformers=transformers.__version__,
        python=platform.python_version(),
        cpu=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name(device) if on_gpu else device.type,
        ranks=learner.ranks.count,
        fsdp=learner.settings.fsdp,
    )
