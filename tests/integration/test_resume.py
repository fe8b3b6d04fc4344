"""How a trainer with a saved state joins a run at a real run-api: its own, or another."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from grpo_core.errors import LeasesFull
from grpo_core.run_api_client import TrainerClient
from grpo_trainer import loop
from grpo_trainer.errors import NoSuchState, StateMismatch, StateOfAnotherRun
from grpo_trainer.resume import find_state, rejoin
from grpo_trainer.saving import Saver
from grpo_trainer.settings import TrainerSettings
from grpo_trainer.state_store import SavedState, StateStore
from grpo_trainer.trainer_state import Position, capture
from tests.fixtures.run_api import start_run_api
from tests.integration.run_api_calls import bulky, register, status, submit
from tests.unit.trainer.test_trainer_state import Side

DEADLINE_S = 60.0
STATE = Position(step=2, batch_id=2, epoch=1)


def settings(http: httpx.Client, save_path: Path, **changes: Any) -> TrainerSettings:
    fixed = {
        **{"model_name": "m", "weight_bridge_mode": "shared_vllm", "save_path": save_path},
        **{"atropos_url": str(http.base_url), "service_deadline_s": DEADLINE_S},
        **{"batch_size": 4, "gradient_accumulation_steps": 1},
    }
    return TrainerSettings(**{**fixed, **changes})


def save(config: TrainerSettings, position: Position = STATE) -> Path:
    side = Side()
    state = capture(side.model, side.optimizer, config, position)
    return StateStore(config.save_path).save(state)


def found(config: TrainerSettings) -> SavedState:
    saved = find_state(config, StateStore(config.save_path))
    assert saved is not None
    return saved


def train_three_batches(http: httpx.Client, config: TrainerSettings) -> None:
    """A trainer that was killed before it acknowledged any; one group more is queued."""
    register(http)
    submit(http, *range(1, 9))
    with TrainerClient(str(http.base_url)) as trainer:
        trainer.register(config.registration(first_step=0))
        assert [trainer.next_batch(DEADLINE_S).id for _ in range(3)] == [1, 2, 3]


def test_batches_in_the_state_do_not_come_again(http: httpx.Client, tmp_path: Path) -> None:
    config = settings(http, tmp_path)
    train_three_batches(http, config)
    save(config)
    with TrainerClient(str(http.base_url)) as trainer:
        assert rejoin(trainer, config, found(config)) == STATE
        assert [trainer.next_batch(DEADLINE_S).id for _ in range(2)] == [3, 4]
    with TrainerClient(str(http.base_url)) as another:  # with no state at all
        another.register(config.registration(first_step=0))
        assert another.next_batch(DEADLINE_S).id == 3


def test_a_new_run_is_refused_and_learns_nothing(http: httpx.Client, tmp_path: Path) -> None:
    """A save path that is used again. Environments would count the state's steps as done."""
    config = settings(http, tmp_path)
    directory = save(config)
    with TrainerClient(str(http.base_url)) as trainer:
        with pytest.raises(StateOfAnotherRun) as told:
            rejoin(trainer, config, found(config))
        for way_out in ("--resume never", "another --save-path", f"--resume {directory}"):
            assert way_out in str(told.value)
    assert http.get("/info").json()["batch_size"] == -1
    assert status(http)[0] == 0


def test_a_run_that_counts_from_a_later_step_is_not_taken_for_ours(
    http: httpx.Client, tmp_path: Path
) -> None:
    register(http, starting_step=10)
    config = settings(http, tmp_path)
    save(config)
    with (
        TrainerClient(str(http.base_url)) as trainer,
        pytest.raises(StateOfAnotherRun, match="has not handed out such a batch"),
    ):
        rejoin(trainer, config, found(config))


def test_a_state_that_is_named_goes_on_in_another_run(http: httpx.Client, tmp_path: Path) -> None:
    """Redis was lost: the steps are kept, the data is what the run has."""
    directory = save(settings(http, tmp_path))
    config = settings(http, tmp_path / "new", resume=str(directory))
    register(http)
    submit(http, 1, 2)
    with TrainerClient(str(http.base_url)) as trainer, capture_logs() as logs:
        assert rejoin(trainer, config, found(config)) == Position(step=2, batch_id=0, epoch=1)
        assert trainer.next_batch(DEADLINE_S).id == 1
    assert [entry["unknown_batch"] for entry in logs] == [2]


def test_what_there_is_to_go_on_from(http: httpx.Client, tmp_path: Path) -> None:
    config = settings(http, tmp_path)
    store = StateStore(tmp_path)
    assert find_state(config, store) is None
    with pytest.raises(NoSuchState, match=r"no trainer_state\.json there"):
        found(settings(http, tmp_path, resume=str(tmp_path)))
    directories = [save(config), save(config, Position(step=4, batch_id=4, epoch=1))]
    assert found(config).directory == directories[1]
    assert find_state(settings(http, tmp_path, resume="never"), store) is None
    for named, expected in ((directories[0], directories[0]), (tmp_path, directories[1])):
        assert found(settings(http, tmp_path / "x", resume=str(named))).directory == expected


def test_a_state_of_another_model_is_refused_unless_it_is_named(
    http: httpx.Client, tmp_path: Path
) -> None:
    directory = save(settings(http, tmp_path))
    with pytest.raises(StateMismatch, match="is a state of m, not of other"):
        found(settings(http, tmp_path, model_name="other"))
    named = settings(http, tmp_path, model_name="other", resume=str(directory))
    assert found(named).directory == directory


def test_a_run_whose_steps_are_all_taken_says_so(http: httpx.Client, tmp_path: Path) -> None:
    """No inference server is needed for that; what was not acknowledged is."""
    config = settings(http, tmp_path, training_steps=2, vllm_url="http://127.0.0.1:1")
    train_three_batches(http, config)
    save(config)
    with capture_logs() as logs:
        loop.train(config)
    assert [entry["event"] for entry in logs] == ["all steps were taken before"]
    with TrainerClient(str(http.base_url)) as another:
        another.register(config.registration(first_step=0))
        assert another.next_batch(DEADLINE_S).id == 3


def test_a_finished_run_in_a_place_that_is_used_again_is_not_silent(
    http: httpx.Client, tmp_path: Path
) -> None:
    config = settings(http, tmp_path, training_steps=2)
    save(config)
    with pytest.raises(StateOfAnotherRun, match="it is a new run, or its Redis lost data"):
        loop.train(config)


def loop_of(api: TrainerClient, config: TrainerSettings) -> Any:
    """As much of `loop.Run` as asking for a batch needs."""
    side, store = Side(), StateStore(config.save_path)
    saver = Saver(config, side.model, side.optimizer, api, store)
    saver.begin(Position(step=0, batch_id=0, epoch=1), is_saved=False)
    sync = SimpleNamespace(tend=lambda: None)
    return SimpleNamespace(settings=config, api=api, sync=sync, saver=saver)


def test_leases_that_are_full_are_let_go_of_after_an_early_save(
    redis_url: str, tmp_path: Path
) -> None:
    options = {"RUN_API_MAX_LEASED_BYTES": "1024"}
    api = start_run_api(redis_url, tmp_path, run_id="early-save", environment=options)
    try:
        with httpx.Client(base_url=api.url) as http, TrainerClient(api.url) as trainer:
            config = settings(http, tmp_path / "saved", state_interval=0, checkpoint_interval=0)
            trainer.register(config.registration(first_step=0))
            for marker in range(1, 7):
                submit(http, marker, **bulky(marker))
            run = loop_of(trainer, config)
            assert loop.next_batch(run, 0, batches_left=9).id == 1
            with pytest.raises(LeasesFull):  # nothing was trained that could be saved
                loop.next_batch(run, 1, batches_left=8)
            run.saver.step_taken(Position(step=1, batch_id=1, epoch=1))
            assert loop.next_batch(run, 1, batches_left=8).id == 2
            assert found(config).record.position == Position(step=1, batch_id=1, epoch=1)
    finally:
        api.process.kill()


def test_batches_that_a_later_state_took_with_it_are_missed(
    http: httpx.Client, tmp_path: Path
) -> None:
    config = settings(http, tmp_path)
    train_three_batches(http, config)
    with TrainerClient(str(http.base_url)) as trainer:
        trainer.register(config.registration(first_step=0))
        trainer.acknowledge(3)
        trainer.resume_after(1)
        with capture_logs() as logs:
            assert loop.next_batch(loop_of(trainer, config), 1, batches_left=8).id == 4
    assert [(e["first"], e["last"]) for e in logs if e["log_level"] == "warning"] == [(2, 3)]
