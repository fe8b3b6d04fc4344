"""Chooses the checkpoint to resume from, and registers the resumed run at run-api."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import asdict, replace
from pathlib import Path

import structlog

from grpo_core.errors import UnknownBatch
from grpo_core.tree.trainer import AUTO, NEVER, TrainerSettings
from grpo_trainer.checkpoint.store import (
    RECORD,
    OpenedEpochs,
    SavedState,
    StateRecord,
    StateStore,
    checksum_of_untrained,
    read_state,
    shapes_of,
)
from grpo_trainer.data.batches import BatchQueue, Position
from grpo_trainer.errors import (
    LostBatches,
    NoSuchState,
    StateMismatch,
    StateOfAnotherRun,
    UnusableSavePath,
)
from grpo_trainer.model.adapter import trained_parameters
from grpo_trainer.model.policy import CausalLM, device_of
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.ranks import ALONE, LOAD, Orders, Ranks

log = structlog.get_logger()


def find_state(settings: TrainerSettings, store: StateStore) -> SavedState | None:
    """The checkpoint that `--resume` selects; None to train from the start.

    Raises:
        NoSuchState: the named directory has no checkpoint.
        DamagedState: the checkpoint's record cannot be read.
        StateMismatch: the newest checkpoint is of another model.
    """
    if settings.resume == NEVER:
        return None
    if settings.resume != AUTO:
        return _named_state(Path(settings.resume))
    saved = store.newest()
    if saved is None:
        return None
    model = saved.record.model_name
    if model != settings.model and Path(model).resolve() != Path(settings.model).resolve():
        raise StateMismatch(
            f"{saved.directory} is a checkpoint of the model {model}, but "
            f"--model is {settings.model}. To train from the start, pass `--resume never` or "
            "another --save-path; if both names mean the same model, pass "
            f"--resume {saved.directory}"
        )
    return saved


def restore(
    saved: SavedState,
    policy: CausalLM,
    optimizer: MasterOptimizer,
    api: BatchQueue,
    settings: TrainerSettings,
    orders: Orders | None = None,
) -> Position:
    """Load the checkpoint into the optimizer, then rejoin the run; returns the position to resume
    at.

    Args: orders: to ranks above 0, which run `restore_part`

    Raises:
        StateMismatch, DamagedState, StateOfAnotherRun, LostBatches: nothing was changed at
            run-api.
    """
    require_fit(saved.record, policy, settings, str(saved.directory))
    orders = orders or Orders(ALONE)
    orders.give(LOAD)
    saved.load(policy, optimizer, orders.ranks if optimizer.parts > 1 else ALONE)
    # --resume may name a checkpoint of another --save-path.
    started = OpenedEpochs(saved.directory.parents[1]).newest()
    at = rejoin(api, settings, saved)
    at = replace(at, epoch=max(at.epoch, started))
    log.info("run.resumed", checkpoint=str(saved.directory), step=at.step, batch_id=at.batch_id)
    return at


def restore_part(
    directory: Path, policy: CausalLM, optimizer: MasterOptimizer, ranks: Ranks
) -> None:
    """Called on ranks above 0 while rank 0 runs `restore`.

    Raises:
        UnusableSavePath: with --fsdp, this rank does not see the checkpoint.
    """
    if optimizer.parts == 1:
        optimizer.load_tensors(list(trained_parameters(policy)), {})
        return
    if not directory.is_dir():
        raise UnusableSavePath(
            f"rank {ranks.index} at {socket.gethostname()} does not see {directory}; with --fsdp, "
            "every rank must see the same --save-path"
        )
    read_state(directory).load(policy, optimizer, ranks)


def require_fit(
    record: StateRecord, policy: CausalLM, settings: TrainerSettings, where: str
) -> None:
    """Compare a checkpoint with the run. Args: where: its directory, for the message

    Raises:
        StateMismatch: another model, mode, adapter or optimizer; lists every difference.
    """
    ours, saved = shapes_of(policy), record.parameters
    is_other_base = record.frozen not in (None, checksum_of_untrained(policy, settings))
    problems = _other_options(record, settings, device_of(policy).type)
    problems += [
        f"{name}: this parameter is not in the checkpoint" for name in ours if name not in saved
    ]
    problems += [
        f"{name}: this parameter is not in the model" for name in saved if name not in ours
    ]
    problems += [
        f"{name}: shape {list(saved[name])} in the checkpoint, {list(shape)} in the model"
        for name, shape in ours.items()
        if name in saved and saved[name] != shape
    ]
    if is_other_base and not problems:
        problems = [
            "frozen weights: those of this run differ from those of the checkpoint; "
            + (
                "if the server serves another run's weights, restart the server"
                if settings.lora is None
                else "--model is another model than the one that the adapter was trained on"
            )
        ]
    if problems:
        raise StateMismatch(
            f"{where} does not fit {settings.model}:\n  "
            + "\n  ".join(problems)
            + "\nto train from the start, pass `--resume never` or another --save-path"
        )


def _other_options(record: StateRecord, settings: TrainerSettings, device_type: str) -> list[str]:
    now = settings.lora
    pairs: list[tuple[str, object, object]] = [
        ("mode", record.mode, settings.sync.mode),
        ("optimizer", record.optimizer, settings.optimizer_on(device_type)),
        ("master dtype", record.master_dtype, settings.master_dtype),
    ]
    if record.lora is not None and now is not None:
        pairs += [
            (f"lora {name}", getattr(record.lora, name), getattr(now, name)) for name in asdict(now)
        ]
    return [
        f"{what}: the checkpoint has {then}, this run has {this}"
        for what, then, this in pairs
        if then != this
    ]


def continued_settings(settings: TrainerSettings, saved: SavedState | None) -> TrainerSettings:
    """The settings with the checkpoint's W&B group and optimizer, unless the user names others."""
    if saved is None:
        return settings
    changes: dict[str, str] = {}
    if saved.record.wandb_group and "wandb_group" not in settings.model_fields_set:
        changes["wandb_group"] = saved.record.wandb_group
    if settings.optimizer is None:
        changes["optimizer"] = saved.record.optimizer
    return settings.model_copy(update=changes)


def rejoin(api: BatchQueue, settings: TrainerSettings, saved: SavedState) -> Position:
    """Register at run-api as the successor of `saved`, and acknowledge the checkpoint's batches.
    The previous trainer may have been killed between saving and acknowledging.

    Returns:
        The checkpoint's position; with batch_id=0 if the run at run-api does not have that batch.
        If Redis lost batches of the checkpoint, with the newest one that it has.

    Raises:
        StateOfAnotherRun: the checkpoint belongs to another run than the one at run-api.
        LostBatches: it includes batches that Redis has lost.
            A checkpoint that `--resume` names may resume anyway, with run-api's data.
    """
    at = saved.record.position
    # Read before registering: a new run must not get the starting step of a foreign checkpoint.
    status = api.status()
    run_uuid = status.run_uuid
    known = run_uuid is not None and run_uuid == saved.record.run_uuid
    if not known and settings.resume == AUTO:
        now = f"run-api's current run is {run_uuid}" if run_uuid else "run-api has no run yet"
        raise _of_another_run(saved, api, now)
    if known and status.last_batch is not None and status.last_batch < at.batch_id:
        at = _before_the_loss(saved, api, settings, status.last_batch)
    api.register(settings.registration(first_step=at.step))
    if known and api.run_uuid != run_uuid:  # it was reset in between
        raise _of_another_run(saved, api, f"run-api's current run is {api.run_uuid}")
    if known and at.batch_id > 0:
        try:
            api.acknowledge(at.batch_id)
        except UnknownBatch as error:
            if settings.resume == AUTO:
                raise _of_another_run(saved, api, str(error)) from error
            known = False
    if not known:
        log.warning(
            "run.mismatched",
            checkpoint=str(saved.directory),
            unknown_batch_id=at.batch_id,
            hint="training continues with the batches of run-api's current run, which is another",
        )
    at = at if known else replace(at, batch_id=0)
    api.resume_after(at.batch_id)
    return at


def leave_complete_run(api: BatchQueue, settings: TrainerSettings, saved: SavedState) -> None:
    """Acknowledge the batches of a run in which nothing is left to train."""
    # If run-api has another run, nothing needs to be acknowledged.
    with contextlib.suppress(StateOfAnotherRun):
        rejoin(api, settings, saved)
    log.warning(
        "run.already_complete",
        reason=f"nothing was trained, because all {saved.record.step} steps are done",
        checkpoint=str(saved.directory),
        hint="raise --steps to continue, or start again with another --save-path",
    )


def _before_the_loss(
    saved: SavedState, api: BatchQueue, settings: TrainerSettings, newest: int
) -> Position:
    """The position in a run whose Redis has lost all batches after `newest`. Their groups may be in
    the queue again."""
    at = saved.record.position
    lost = f"{newest + 1} to {at.batch_id}"
    if settings.resume == AUTO:
        raise LostBatches(
            f"Redis has lost batches {lost} of this run, which {saved.directory} includes. To lose "
            "none, run Redis with --appendonly yes --appendfsync always. Some groups of these "
            f"batches may be in the queue again. To train on them twice, pass --resume "
            f"{saved.directory}; to train on none twice, delete the queue before that: "
            f"curl {api.base_url}/reset_data"
        )
    log.warning(
        "batches.lost",
        first=newest + 1,
        last=at.batch_id,
        hint="Redis lost them; groups of these batches that are queued again are trained on twice",
    )
    return replace(at, batch_id=newest)


def _of_another_run(saved: SavedState, api: BatchQueue, found: str) -> StateOfAnotherRun:
    record = saved.record
    return StateOfAnotherRun(
        f"{saved.directory} includes {record.step} steps, the newest step with batch "
        f"{record.batch_id} of run {record.run_uuid or 'unknown'}, but run-api at {api.base_url} "
        f"has a different run, or Redis lost data ({found}). To train from the start, pass "
        "`--resume never` or another --save-path; to resume from this checkpoint with run-api's "
        f"data, pass --resume {saved.directory}"
    )


def _named_state(path: Path) -> SavedState:
    if (path / RECORD).exists():
        return read_state(path)
    saved = StateStore(path).newest()
    if saved is None:
        raise NoSuchState(
            f"--resume {path}: this directory has no {RECORD} and contains no checkpoint; "
            "name a directory in trainer_state/, or the --save-path of a run"
        )
    return saved
