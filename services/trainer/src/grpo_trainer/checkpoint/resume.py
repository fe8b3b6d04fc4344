"""Which saved state a trainer goes on from, and how it joins the run again at run-api."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import structlog

from grpo_core.clients.run_api import TrainerClient
from grpo_core.errors import UnknownBatch
from grpo_trainer.checkpoint.state import Position, load_state, require_fit
from grpo_trainer.checkpoint.store import RECORD, OpenedEpochs, SavedState, StateStore, read_state
from grpo_trainer.config.trainer import AUTO, NEVER, TrainerSettings
from grpo_trainer.errors import NoSuchState, StateMismatch, StateOfAnotherRun
from grpo_trainer.model.policy_protocol import CausalLM
from grpo_trainer.optim.master_optimizer import MasterOptimizer

log = structlog.get_logger()


def find_state(settings: TrainerSettings, store: StateStore) -> SavedState | None:
    """What `--resume` asks for; None to train from the start.

    Raises:
        NoSuchState: it names a directory without a state.
        DamagedState: the record of the state cannot be read.
        StateMismatch: the newest state is of another model.
    """
    if settings.resume == NEVER:
        return None
    if settings.resume != AUTO:
        return _named_state(Path(settings.resume))
    saved = store.newest()
    if saved is not None and not _is_same_model(saved.record.model_name, settings.model):
        raise StateMismatch(
            f"{saved.directory} is a state of {saved.record.model_name}, not of "
            f"{settings.model}; pass --resume {saved.directory} where that is the same model "
            "in another place, --resume never to train from the start, or another --save-path"
        )
    return saved


def restore(
    saved: SavedState,
    policy: CausalLM,
    optimizer: MasterOptimizer,
    api: TrainerClient,
    settings: TrainerSettings,
) -> Position:
    """Put the state into the optimizer, then join the run; returns where to go on.

    Raises:
        StateMismatch, DamagedState, StateOfAnotherRun: nothing was changed at run-api.
    """
    require_fit(saved.record, policy, settings, str(saved.directory))
    load_state(saved.load(), policy, optimizer)
    at = rejoin(api, settings, saved)
    noted = OpenedEpochs(saved.directory.parents[1]).newest()  # where --save-path is another
    at = replace(at, epoch=max(at.epoch, noted))
    log.info("resuming", state=str(saved.directory), step=at.step, batch_id=at.batch_id)
    return at


def continued_settings(settings: TrainerSettings, saved: SavedState | None) -> TrainerSettings:
    """The W&B runs of all starts are in one group, unless the user names another."""
    if saved is None or not saved.record.wandb_group or "wandb_group" in settings.model_fields_set:
        return settings
    return settings.model_copy(update={"wandb_group": saved.record.wandb_group})


def rejoin(api: TrainerClient, settings: TrainerSettings, saved: SavedState) -> Position:
    """Register as the one who goes on after `saved`, and acknowledge what is in it: the trainer
    before may have been killed in between.

    Returns:
        That of the state; without a batch where the run has not handed it out.

    Raises:
        StateOfAnotherRun: the run at run-api is not that of the state. A state that `--resume`
            names may go on there all the same, with the data that the run has.
    """
    at = saved.record.position
    # Asked first: a run that is new must not learn a starting step from a state of another.
    run_uuid = api.status().run_uuid
    known = run_uuid is not None and run_uuid == saved.record.run_uuid
    if not known and settings.resume == AUTO:
        raise _of_another_run(saved, api, f"run {run_uuid}" if run_uuid else "no run yet")
    api.register(settings.registration(first_step=at.step))
    if known and api.run_uuid != run_uuid:  # it was reset between the two
        raise _of_another_run(saved, api, f"run {api.run_uuid}")
    if known and at.batch_id > 0:
        try:
            api.acknowledge(at.batch_id)
        except UnknownBatch as error:
            if settings.resume == AUTO:
                raise _of_another_run(saved, api, str(error)) from error
            known = False
    if not known:
        log.warning(
            "the run at run-api is not the one of this state: going on with the data that it has",
            state=str(saved.directory),
            unknown_batch=at.batch_id,
        )
    at = at if known else replace(at, batch_id=0)
    api.resume_after(at.batch_id)
    return at


def _of_another_run(saved: SavedState, api: TrainerClient, found: str) -> StateOfAnotherRun:
    record = saved.record
    return StateOfAnotherRun(
        f"{saved.directory} has taken {record.step} steps, the last one on batch "
        f"{record.batch_id} of run {record.run_uuid or 'unknown'}, and the run at {api.base_url} "
        f"is not the run of this state, or its Redis lost data ({found}). To train from the "
        "start, pass --resume never or another --save-path; to go on from this state with that "
        f"run's data, --resume {saved.directory}"
    )


def _named_state(path: Path) -> SavedState:
    if (path / RECORD).exists():
        return read_state(path)
    saved = StateStore(path).newest()
    if saved is None:
        raise NoSuchState(
            f"--resume {path}: no {RECORD} there, and no state of a run that saved there; name a "
            "directory below trainer_state/, or a --save-path"
        )
    return saved


def _is_same_model(saved: str, wanted: str) -> bool:
    return saved == wanted or Path(saved).resolve() == Path(wanted).resolve()
