"""The environment's main loop: polls run-api and samples groups until the run is complete."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import structlog

from grpo_core.alerts import DROPPED_ADVICE, MOST_DROPPED
from grpo_core.clients.run_api import EnvironmentClient
from grpo_core.deadline import Deadline
from grpo_core.errors import GrpoError, RequestRefused, ServiceUnavailable
from grpo_core.metrics_port import serving_metrics
from grpo_core.security import plain
from grpo_core.wire.run_api import EnvironmentRegistration, EnvironmentStatus, TrainerInfo
from grpo_env.assembly import TaskSet, open_engine, sampling_plan
from grpo_env.evaluation import TrainingEvaluation
from grpo_env.inference.pool import InferencePool
from grpo_env.pacing import FailureBudget, StallDetector, groups_to_start
from grpo_env.prometheus import EnvironmentMetrics
from grpo_env.registration import Log, Membership, join_run, wandb_log
from grpo_env.rollout.chat_template import ChatTemplate
from grpo_env.rollout.engine import RolloutEngine
from grpo_env.rollout.groups import SamplingPlan
from grpo_env.rollout.producer import GroupProducer
from grpo_env.settings import EnvServerSettings
from grpo_env.tasks.curriculum_files import CurriculumFiles

log = structlog.get_logger()

_POLL_S = 0.1
_FIRST_IDLE_POLL_S = 0.01
"""With nothing to sample, the next poll is due after this time. Each further one is due after twice
the time, up to `_POLL_S`: a fast trainer takes the next batch soon."""
_DISCONNECT_S = 5.0
_NOT_FOUND = 404
_WAS_COMPLETE = (
    "the run was complete when this environment started; to train further, start the trainer "
    "first; to start a new run, call /reset_data of run-api"
)

T = TypeVar("T")


class ReadyFileNotWritten(GrpoError):
    """The file that `--ready-file` names cannot be created, so health checks would always fail."""


class GroupLargerThanBatch(GrpoError):
    """The trainer's batch is too small for one group of this environment."""


async def serve(settings: EnvServerSettings, tasks: TaskSet, template: ChatTemplate) -> None:
    """Submit groups until the run is complete.

    Cancelling aborts the groups that are being sampled and disconnects from run-api.

    Raises:
        GrpoError: the environment cannot continue.
    """
    key = plain(settings.run_api_token)
    async with (
        open_engine(settings, tasks, template) as (engine, pool),
        EnvironmentClient(settings.run_api_url, settings.run_api_deadline_s, key) as api,
    ):
        with _ready_file(settings.ready_file):
            worker = Worker(settings, tasks, api, engine, pool)
            with serving_metrics(settings.metrics_host, settings.metrics_port, worker.metrics):
                await worker.run()


@contextlib.contextmanager
def _ready_file(path: Path | None) -> Iterator[None]:
    """The file exists while the context is open, for a health check. None: no file."""
    if path is None:
        yield
        return
    try:
        path.touch()
    except OSError as error:
        raise ReadyFileNotWritten(
            f"--ready-file: cannot create {path}: {error}; choose a path that this user can write"
        ) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


@dataclass(eq=False)
class Worker:
    """One environment's membership in a run, and the groups that it is sampling."""

    settings: EnvServerSettings
    tasks: TaskSet
    api: EnvironmentClient
    engine: RolloutEngine
    pool: InferencePool

    def __post_init__(self) -> None:
        settings, tasks = self.settings, self.tasks
        # run-api and the pace count sequences; a rollout may have several.
        self._group_sequences = settings.group_size * tasks.max_sequences
        self._registration = EnvironmentRegistration(
            max_token_length=settings.seq_len,
            desired_name=settings.display_name,
            weight=settings.weight,
            group_size=self._group_sequences,
            min_batch_allocation=settings.min_batch_allocation,
        )
        self._run_api = FailureBudget("run-api", settings.run_api_deadline_s)
        self._stream = stream = tasks.training_stream(settings.seed, settings.curriculum)
        self._curriculum = CurriculumFiles(settings.curriculum_dir, stream)
        self._curriculum.restore()
        self._producer = GroupProducer(settings, stream, self.engine, self.api)
        self._step, self._steps = 0, 1  # training steps that are done, and of the run
        self._warned_of = 1  # dropped groups
        self._log_to_wandb: Log = lambda _step, _fields: None
        self._evaluation = TrainingEvaluation(
            settings,
            tasks.tasks,
            self.engine,
            self.pool,
            lambda step, found: self._log_to_wandb(step, found),
            self._producer.untrained,
        )
        self._membership: Membership | None = None
        self._trainer = TrainerInfo(batch_size=-1, max_token_len=-1)
        self._prompts_fit: int | None = None  # the max_token_length that prompts were filtered for
        self._stall = StallDetector(settings.trainer_deadline_s)
        self._next_run: Deadline | None = None
        self._in_flight: set[asyncio.Task[None]] = set()
        self._idle_poll_s = _FIRST_IDLE_POLL_S
        self.metrics = EnvironmentMetrics(
            self._producer.counts, self.pool, lambda: len(self._in_flight), stream.pools
        )

    async def run(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            # Closed last: W&B may need seconds to finish its run.
            try:
                membership = await self._join()
                await asyncio.to_thread(
                    self._stream.go_on, membership.item_positions, membership.starting_step
                )
                self._log_to_wandb = await stack.enter_async_context(
                    wandb_log(self.settings, self.api, membership)
                )
                await self._feed_trainer(membership)
            finally:
                await self._leave()
                self.pool.log_requests()
                self._curriculum.save(self._step)

    async def _feed_trainer(self, membership: Membership) -> None:
        while True:
            status = await self._poll_status(membership.env_id)
            if status is None:
                membership = await self._join()
                continue
            self.pool.follow(status.servers)
            total_steps = membership.total_steps(self.settings.steps, status.num_steps)
            if status.current_step != self._step:
                self._producer.counts.begin_batch()
            self._step, self._steps = status.current_step, total_steps
            self._producer.counts.queued = status.queue_size
            # Enough groups in the queue do not complete a run: the trainer may still refuse some.
            if status.current_step >= total_steps:
                if self._waits_for_the_next_run():
                    await self._wait_for_a_group(_POLL_S)
                    continue
                groups_sent = self._producer.counts.groups_sent
                # A trainer that resumes near the end may find enough groups in the queue.
                if groups_sent or self.settings.steps > 0:
                    await self._evaluation.finish(total_steps, self._sampling())
                hint = {} if groups_sent else {"hint": _WAS_COMPLETE}
                log.info("run.completed", step=status.current_step, groups_sent=groups_sent, **hint)
                await self._tell_counts(status.current_step, self._producer.counts.report())
                return
            self._evaluation.start_if_due(status.current_step, self._sampling())
            await self._work_until_next_poll(status, total_steps)
            if fields := self._producer.counts.report_if_due():
                await self._tell_counts(status.current_step, fields)
                # A restarted trainer may use another batch size.
                await self._retry(self._ask_trainer_info)

    async def _tell_counts(self, step: int, fields: dict[str, Any]) -> None:
        """Log what was counted, and a warning each time that twice as many groups were dropped."""
        counts, untrained = self._producer.counts, self._producer.untrained
        if pools := [Counter(of_task) for of_task in self._stream.pools().values()]:
            fields = {**fields, "pools": dict(sum(pools, Counter()))}
        self._curriculum.save(self._step)
        await untrained.save_dropped()
        self._log_to_wandb(step, fields)
        now = {"groups_in_progress": len(self._in_flight), **self._evaluation.report_fields}
        log.info("groups.counted", for_batch=counts.for_batch, **now, **fields)
        if fields["dropped_share"] >= MOST_DROPPED and counts.dropped >= 2 * self._warned_of:
            self._warned_of = counts.dropped
            log.warning(
                "rewards.all_equal",
                for_batch=counts.for_batch,
                completions=untrained.examples,
                hint=DROPPED_ADVICE,
            )

    def _waits_for_the_next_run(self) -> bool:
        """True if the run was complete before this environment joined, because another trainer may
        then extend it. False if the environment sent groups, and so saw the run end."""
        if self._producer.counts.groups_sent:
            return False
        if self._next_run is None:
            self._next_run = Deadline(self.settings.next_run_deadline_s)
            if not self._next_run.has_passed:
                log.info("wait_for_next_run.started", deadline_s=self._next_run.seconds)
        return not self._next_run.has_passed

    async def _join(self) -> Membership:
        # Filter with our own limit before registering, because run-api expects groups from
        # registered environments.
        await self._skip_long_prompts()
        membership = await self._retry(
            lambda: join_run(self.api, self._registration, self.settings.trainer_deadline_s)
        )
        self._membership = membership
        self._producer.join(membership.env_id, membership.run_uuid)
        await self._retry(self._ask_trainer_info)
        await self._skip_long_prompts()
        log.info(
            "environment.registered",
            env_id=membership.env_id,
            name=membership.wandb_name,
            step=membership.starting_step,
            total_steps=membership.total_steps(self.settings.steps),
            batch_size=self._trainer.batch_size,
        )
        return membership

    async def _ask_trainer_info(self) -> None:
        self._trainer = await self.api.info()
        batch_size = self._trainer.batch_size
        self._producer.counts.batch = -(-batch_size // self._group_sequences)
        if 0 < batch_size < self._group_sequences:
            raise GroupLargerThanBatch(
                f"a group of {self._group_sequences} sequences (--group-size "
                f"{self.settings.group_size}, {self.tasks.max_sequences} for each rollout) is "
                f"larger than the trainer's batch of {batch_size} sequences; use a smaller "
                "--group-size, or start the trainer with a larger batch"
            )

    async def _skip_long_prompts(self) -> None:
        plan = self._sampling()
        if self._prompts_fit is None or plan.max_token_length < self._prompts_fit:
            await asyncio.to_thread(self._producer.skip_long_prompts, plan)
            self._prompts_fit = plan.max_token_length

    async def _poll_status(self, env_id: int) -> EnvironmentStatus | None:
        """None if run-api was reset and no longer has this environment."""
        try:
            return await self._retry(lambda: self.api.status(env_id))
        except RequestRefused as error:
            if error.status != _NOT_FOUND:
                raise
        log.warning("registration.lost", env_id=env_id, reason="run-api was reset")
        self._membership = None
        await asyncio.sleep(_POLL_S)
        return None

    async def _retry(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Repeat a request to run-api while it fails. Raises `ServiceUnavailable`: run-api has
        failed for longer than its deadline."""
        while True:
            try:
                answer = await ask()
            except ServiceUnavailable as error:
                self._run_api.failed(error)
                await asyncio.sleep(self._run_api.delay_s)
            else:
                self._run_api.succeeded()
                return answer

    async def _work_until_next_poll(self, status: EnvironmentStatus, total_steps: int) -> None:
        """Sample as many groups as allowed, for one poll interval; less if there is none."""
        poll_at = time.monotonic() + _POLL_S
        sent_before = self._producer.counts.groups_sent
        while True:
            groups = groups_to_start(
                status,
                self._trainer.batch_size,
                self._group_sequences,
                total_steps,
                max_batches_offpolicy=self.settings.max_batches_offpolicy,
                max_concurrent_groups=self.settings.max_concurrent_groups,
                min_batch_allocation=self.settings.min_batch_allocation or 0.0,
                in_flight=len(self._in_flight),
                sent_since_status=self._producer.counts.groups_sent - sent_before,
                kept_share=self._producer.counts.kept_share,
            )
            groups = min(groups, self._evaluation.groups_for_training - len(self._in_flight))
            is_idle = not (groups > 0 or self._in_flight or self._evaluation.is_running)
            self._stall.observe(status.current_step, idle=is_idle)
            if not self._producer.delay_s:
                for _ in range(groups):
                    produced = self._producer.produce(self._sampling(), self._step)
                    self._in_flight.add(asyncio.create_task(produced))
            if groups <= 0 and not self._in_flight:
                await asyncio.sleep(self._idle_poll_s)
                self._idle_poll_s = min(2 * self._idle_poll_s, _POLL_S)
                return
            self._idle_poll_s = _FIRST_IDLE_POLL_S
            left_s = poll_at - time.monotonic()
            if left_s <= 0:
                return
            await self._wait_for_a_group(left_s)

    async def _wait_for_a_group(self, timeout_s: float) -> None:
        if not self._in_flight:
            await asyncio.sleep(timeout_s)
            return
        done, self._in_flight = await asyncio.wait(
            self._in_flight, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        errors = [error for task in done if (error := task.exception())]
        if errors:
            raise errors[0]

    async def _leave(self) -> None:
        await self._evaluation.cancel()
        for task in self._in_flight:
            task.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)
        self._in_flight.clear()
        if self._membership is None:
            return
        with contextlib.suppress(GrpoError, TimeoutError):
            async with asyncio.timeout(_DISCONNECT_S):
                await self.api.disconnect(self._membership.env_id)

    def _sampling(self) -> SamplingPlan:
        limit = self._trainer.max_token_len
        return sampling_plan(self.settings, self.tasks, limit, self._step, self._steps)
