"""Redis starts with the data of an earlier moment, which is what a power failure leaves of a Redis
with `appendfsync everysec`, and a failover of one with a late replica."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from grpo_core.clients.run_api import EnvironmentClient, TrainerClient
from grpo_core.errors import UnknownBatch
from grpo_core.wire.run_api import EnvironmentCount
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.checkpoint.resume import rejoin
from grpo_trainer.data.batches import EnvironmentWatch, Position
from grpo_trainer.errors import LostBatches
from tests.fixtures.run_api import RunningApi, start_run_api
from tests.integration.run_api_calls import ApiClient, group
from tests.integration.run_store_rig import Run
from tests.integration.test_resume import found, save, settings
from tests.support.batches import next_batch
from tests.support.redis_server import OwnRedis
from tests.support.wait import DEADLINE_S


class LossyRedis(OwnRedis):
    @property
    def _file(self) -> Path:
        return self.directory / "appendonly.aof"

    def remember(self) -> None:
        """With `appendfsync always`, the file has all that was answered."""
        shutil.copy(self._file, self._file.with_suffix(".earlier"))

    def lose(self) -> None:
        """Kill Redis, and start it with what `remember` copied."""
        self.process.kill()
        shutil.copy(self._file.with_suffix(".earlier"), self._file)
        self.start()


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LossyRedis]:
    redis = LossyRedis(tmp_path_factory.mktemp("redis"))
    yield redis
    redis.process.stop()


@pytest.fixture(scope="module")
def apis(lossy: LossyRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningApi]]:
    """Two run-api processes of one run."""
    running = [start_run_api(lossy.url, tmp_path_factory.mktemp("run-api")) for _ in range(2)]
    yield running
    for api in running:
        api.process.stop()


@pytest.fixture
def http(apis: list[RunningApi]) -> Iterator[ApiClient]:
    """Of a new run."""
    with ApiClient(base_url=apis[0].url, timeout=DEADLINE_S) as client:
        client.get("/reset_data").raise_for_status()
        yield client


async def submit(api: RunningApi, *markers: int, run_uuid: str) -> None:
    async with EnvironmentClient(api.url, DEADLINE_S) as environment:
        for marker in markers:
            await environment.submit(ScoredGroup.model_validate(group(marker)), run_uuid)


async def test_lost_groups_are_counted_and_named_by_run_api_and_trainer(
    lossy: LossyRedis, apis: list[RunningApi], http: ApiClient, tmp_path: Path
) -> None:
    one, two = apis
    config, watch = settings(http, tmp_path), EnvironmentWatch(60.0)
    with TrainerClient(one.url) as trainer:
        trainer.register(config.registration(first_step=0))
        await submit(one, 1, 2, 3, run_uuid=trainer.run_uuid)
        lossy.remember()
        await submit(one, 4, 5, 6, 7, run_uuid=trainer.run_uuid)
        await submit(two, 8, 9, run_uuid=trainer.run_uuid)
        lossy.lose()
        # another run-api uses the new Redis first, and queues more than was lost
        await submit(two, *range(10, 19), run_uuid=trainer.run_uuid)
        assert http.status() == (0, 3 + 9)
        assert http.get("/status").json()["lost_groups"] == 6
        assert http.run_facts()["lost_groups_total"] == 6
        assert [next_batch(trainer).id for _ in range(6)] == [1, 2, 3, 4, 5, 6]
        with capture_logs() as logs:
            trainer_waits(trainer, watch)
    assert [(entry["event"], entry["lost_groups"]) for entry in logs] == [("groups.lost", 6)]
    for api, lost in ((one, 4), (two, 2)):
        (line,) = [e for e in api.process.log_text().splitlines() if "redis.lost_groups" in e]
        assert f"groups={lost} " in line
        assert "--appendfsync always" in line


def trainer_waits(trainer: TrainerClient, watch: EnvironmentWatch) -> None:
    """Until it hears how many environments there are."""
    watch.wait_started()
    count = trainer.poll()
    assert isinstance(count, EnvironmentCount)
    watch.check(count)


def test_a_restart_that_loses_nothing_is_no_loss(lossy: LossyRedis, http: ApiClient) -> None:
    http.register()
    http.submit(1, 2, 3)
    http.get("/reset_data")
    http.register()
    http.submit(4, 5)
    lossy.remember()
    lossy.lose()
    http.submit(6)
    lossy.remember()
    lossy.lose()
    assert (http.status(), http.get("/status").json()["lost_groups"]) == ((0, 3), 0)


async def test_a_new_connection_to_the_same_redis_is_no_loss(run: Run) -> None:
    await run.submit(1, 2)
    await run.link._drop_idle_connections()
    await run.submit(3, 4)
    assert (await run.store.stats()).lost_groups == 0


async def test_lost_batches_end_the_trainer_by_name_and_a_named_checkpoint_goes_on(
    lossy: LossyRedis, apis: list[RunningApi], http: ApiClient, tmp_path: Path
) -> None:
    config = settings(http, tmp_path)
    with TrainerClient(config.run_api_url) as trainer:
        trainer.register(config.registration(first_step=0))
        await submit(apis[0], *range(1, 11), run_uuid=trainer.run_uuid)
        assert [next_batch(trainer).id for _ in range(2)] == [1, 2]
        lossy.remember()  # two leases
        assert [next_batch(trainer).id for _ in range(2)] == [3, 4]
        directory = save(config, Position(step=3, batch_id=3, epoch=1))
        trainer.acknowledge(3)
        lossy.lose()
        with pytest.raises(UnknownBatch, match=r"never handed out batch 4; .* is 2\. Redis may"):
            next_batch(trainer)
    with TrainerClient(config.run_api_url) as trainer:
        with pytest.raises(LostBatches, match=rf"lost batches 3 to 3 .*--resume {directory}"):
            rejoin(trainer, config, found(config))
        config = settings(http, tmp_path / "new", resume=str(directory))
        with capture_logs() as logs:
            assert rejoin(trainer, config, found(config)) == Position(step=3, batch_id=2, epoch=1)
        assert [(e["event"], e["first"], e["last"]) for e in logs] == [("batches.lost", 3, 3)]
        # the groups of the lost batches 3 and 4 were in the queue when the file was copied
        batches = [next_batch(trainer) for _ in range(3)]
    assert [(b.id, [g.tokens[0][0] for g in b.groups]) for b in batches] == [
        (3, [5, 6]),
        (4, [7, 8]),
        (5, [9, 10]),
    ]
