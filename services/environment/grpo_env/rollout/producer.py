"""Produces one group, from the prompt to the submission, and counts groups."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

import structlog

from grpo_core.clients.run_api import EnvironmentClient
from grpo_core.errors import GrpoError, RequestRefused, ServiceUnavailable
from grpo_core.wire.run_api import QUEUE_FULL
from grpo_core.wire.scored_group import RewardSample, RolloutFacts
from grpo_env.pacing import FailureBudget, RewardFailures
from grpo_env.rollout.attempts import Attempt, Attempts
from grpo_env.rollout.engine import RolloutEngine
from grpo_env.rollout.grader import Grade
from grpo_env.rollout.groups import FAILED, FailureReason, GroupLost, SampledGroup, SamplingPlan
from grpo_env.rollout.teacher import TeacherUnavailable
from grpo_env.rollout.untrained import UntrainedRollouts
from grpo_env.settings import EnvServerSettings
from grpo_env.tasks.item_stream import ItemStream
from grpo_env.tasks.items import Draw, Item

log = structlog.get_logger()

_REPORT_EVERY_S = 5.0
_RECENT_GROUPS = 64
_CONFLICT = 409


class NoPromptFits(GrpoError):
    """Every prompt of the data set is too long."""


@dataclass(eq=False)
class GroupProducer:
    """Samples and submits groups. Start none while `delay_s` is above 0: a service is failing."""

    settings: InitVar[EnvServerSettings]
    items: ItemStream
    engine: RolloutEngine
    api: EnvironmentClient

    def __post_init__(self, settings: EnvServerSettings) -> None:
        self._inference = FailureBudget("vllm-server", settings.request_deadline_s)
        # Submissions may fail even if run-api answers other requests.
        self._submissions = FailureBudget("run-api", settings.run_api_deadline_s)
        self._reward_failures = RewardFailures(settings.max_failed_rewards)
        self._teacher = FailureBudget("teacher", settings.request_deadline_s)
        self._rewards = RewardTotals()
        self._env_id, self._run_uuid = -1, ""
        self.counts = GroupCounts()
        self._attempts = Attempts()
        self.untrained = UntrainedRollouts(settings.untrained_dir)

    @property
    def delay_s(self) -> float:
        """Seconds until a failing service should be tried again; 0 if none fails."""
        budgets = self._inference, self._submissions, self._teacher
        return max(budget.delay_s for budget in budgets)

    def join(self, env_id: int, run_uuid: str) -> None:
        """Groups whose sampling begins from now on belong to this run."""
        self._env_id, self._run_uuid = env_id, run_uuid
        self.untrained.begin()

    def skip_long_prompts(self, plan: SamplingPlan) -> None:
        """Drop prompts that leave too little room for a whole completion, which would be cut off
        before its result. This encodes the whole data set.

        Raises:
            NoPromptFits: no prompt leaves enough room.
        """
        before = len(self.items)
        emptied = self.items.keep(
            lambda item: (
                item.task.names_prompts
                or len(self.engine.prompt_ids(item)) <= plan.longest_prompt(item.task)
            )
        )
        if emptied:
            raise NoPromptFits(
                f"{', '.join(emptied)}: all prompts are too long: a prompt and its longest "
                f"completion must together have fewer than {plan.max_token_length} tokens; raise "
                "--seq-len of the environment and of the trainer, or lower --max-completion-tokens"
            )
        log.info(
            "prompts.filtered",
            kept=len(self.items),
            too_long=before - len(self.items),
            seq_len=plan.max_token_length,
        )

    async def produce(self, plan: SamplingPlan, step: int) -> None:
        """Sample one group and submit it, or count the reason why it was lost.

        Args: step: the training step now

        Raises:
            EveryGroupRefused: a server refused every recent group.
            RewardsFail, RolloutsFail: too many groups could not be graded.
            ServiceUnavailable: a server failed for longer than its deadline.
            ProtocolViolation, MisalignedCompletion: a server's answer is not valid.
            CurriculumUnusable: the rule of the curriculum fails.
        """
        env_id, run_uuid = self._env_id, self._run_uuid  # of the run in which the sampling begins
        draw = self.items.draw()
        attempt = self._attempts.begin(draw.item, step + 1)
        try:
            sampled = await self.engine.roll_out(draw.item, plan)
        except ServiceUnavailable as error:
            budget, why = self._inference, FailureReason.UNAVAILABLE
            if isinstance(error, TeacherUnavailable):
                budget, why = self._teacher, FailureReason.TEACHER_UNAVAILABLE
            budget.failed(error)
            self.items.put_back(draw)
            self._lose(attempt, SampledGroup(), why, error)
            return
        self._note_grades(draw.item, sampled, step)
        if (lost := sampled.lost) is None:
            self._inference.succeeded()
            self._teacher.succeeded()
            await self._send(sampled, env_id, run_uuid, draw, attempt)
            return
        self._record(attempt, sampled)
        if lost.reason is FailureReason.ABORTED:
            self.items.put_back(draw)
        else:
            self.items.used(draw)
        if lost.reason is FailureReason.EQUAL_SCORES and run_uuid == self._run_uuid:
            self.untrained.drop(step + 1, sampled)
        if lost.reason is FailureReason.REFUSED:
            self._inference.refused(lost.detail)
        else:
            self._inference.succeeded()
        if lost.reason is FailureReason.TEACHER_REFUSED:
            self._teacher.refused(lost.detail)

    def _note_grades(self, item: Item, sampled: SampledGroup, step: int) -> None:
        """Raises `RewardsFail`, `RolloutsFail`."""
        scores = [grade.score for grade in sampled.grades]
        self._rewards.add(sampled.grades)
        if sampled.group is not None:  # graded, and maybe dropped
            self.items.graded(item, scores, step)
        else:
            self.items.lost(item)
        if sampled.lost is not None and sampled.lost.reason in FAILED:
            of_rollout = sampled.lost.reason is FailureReason.FAILED_ROLLOUT
            self._reward_failures.failed(sampled.lost.detail, of_rollout)
        elif scores:
            self._reward_failures.graded()

    async def _send(
        self, sampled: SampledGroup, env_id: int, run_uuid: str, draw: Draw, attempt: Attempt
    ) -> None:
        group = sampled.group
        assert group is not None
        rewards, self._rewards = self._rewards, RewardTotals()
        facts = RolloutFacts(reward_sample=RewardSample(**vars(rewards))).on_the_wire()
        overrides = (group.group_overrides or {}) | facts | self._attempts.on_the_wire(draw.item)
        group = group.model_copy(update={"env_id": env_id, "group_overrides": overrides})
        try:
            await self.api.submit(group, run_uuid, self.items.positions(draw))
        except RequestRefused as error:
            self._rewards.add_totals(rewards)
            self._lose(attempt, sampled, FailureReason.REFUSED, error)
            # A conflict means that run-api was reset meanwhile. The next poll detects that.
            if error.status == _CONFLICT:
                self.items.put_back(draw)
            else:
                self.items.used(draw)
                self._submissions.refused(str(error))
        except ServiceUnavailable as error:
            # The client repeated the submission for as long as run-api keeps idempotency keys. It
            # may have arrived, so neither the group nor its rewards are sent again: a gap is
            # harmless, but a duplicate is not.
            if QUEUE_FULL in str(error):
                self.items.put_back(draw)
                self._submissions.succeeded()
            else:
                self.items.used(draw)
                self._submissions.failed(error)
            self._lose(attempt, sampled, FailureReason.UNDELIVERED, error)
        else:
            self.items.used(draw)
            self._submissions.succeeded()
            self.counts.groups_sent += 1
            self._record(attempt, sampled)

    def _lose(
        self, attempt: Attempt, sampled: SampledGroup, reason: FailureReason, error: Exception
    ) -> None:
        self._record(attempt, replace(sampled, lost=GroupLost(reason, str(error))))

    def _record(self, attempt: Attempt, sampled: SampledGroup) -> None:
        self.counts.record(sampled)
        said = next((rollout[0] for rollout in sampled.sequences if rollout), None)
        tokens = None if said is None else said.prompt_tokens
        if said is None and not attempt.item.task.drives_itself:
            tokens = len(self.engine.prompt_ids(attempt.item))
        if (line := self._attempts.end(attempt, sampled, tokens)) is not None:
            self.untrained.lose(line)
        # Equal scores are normal for a good policy, so only the regular report counts them.
        lost = sampled.lost
        if lost is not None and lost.reason is not FailureReason.EQUAL_SCORES:
            log.warning("group.lost", reason=lost.reason.value, detail=lost.detail)


@dataclass
class RewardTotals:
    """Rewards since the last submission, including those of dropped groups.

    The mean over submitted groups alone would be biased: groups with equal scores are dropped, and
    those are the prompts that the policy always or never solves.
    """

    sum: float = 0.0
    count: int = 0
    parts: Counter[str] = field(default_factory=Counter)
    groups: int = 0
    equal_groups: int = 0

    def add(self, grades: Sequence[Grade]) -> None:
        """Count the grades of one group."""
        self.groups += bool(grades)
        self.equal_groups += len({grade.score for grade in grades}) == 1
        for grade in grades:
            self.sum += grade.score
            self.count += 1
            self.parts.update(grade.parts)

    def add_totals(self, others: RewardTotals) -> None:
        self.sum += others.sum
        self.count += others.count
        self.parts.update(others.parts)
        self.groups += others.groups
        self.equal_groups += others.equal_groups


class GroupCounts:
    """Counts groups over the whole run, and means and rates since the last report.

    `reported`: the fields of the newest report. `queued`, `batch`: groups in the queue, and those
    that the trainer takes at once.
    """

    def __init__(self) -> None:
        self.groups_sent = 0
        self.reported: dict[str, Any] = {}
        self.queued = self.batch = 0
        self.failures: Counter[FailureReason] = Counter()
        self._failures_before: Counter[FailureReason] = Counter()  # this batch
        self._recent: deque[bool] = deque(maxlen=_RECENT_GROUPS)  # whether each was kept
        self._reported_at = time.monotonic()
        self._window: Counter[str] = Counter()  # since then
        self._rewards = RewardTotals()

    @property
    def kept_share(self) -> float:
        """Share of the recent groups that were not dropped for equal scores; 1 at the start."""
        return (1 + sum(self._recent)) / (1 + len(self._recent))

    def record(self, sampled: SampledGroup) -> None:
        """Count one sampled group. `groups_sent` is counted separately."""
        tokens = sampled.completion_tokens
        self._rewards.add(sampled.grades)
        reason = sampled.lost.reason if sampled.lost else None
        if reason is not None:
            self.failures[reason] += 1
        self._recent.append(reason is not FailureReason.EQUAL_SCORES)
        self._window.update(tokens=tokens, graded_tokens=tokens if sampled.grades else 0)

    @property
    def dropped(self) -> int:
        return self.failures[FailureReason.EQUAL_SCORES]

    def begin_batch(self) -> None:
        self._failures_before = self.failures.copy()

    @property
    def for_batch(self) -> str:
        """`4 of 8 groups for this batch, 204 dropped; of the newest, 98 % have equal scores`, and
        `0 of 8 groups for this batch, 0 dropped, 6 lost`"""
        failures = self.failures - self._failures_before
        dropped = failures.pop(FailureReason.EQUAL_SCORES, 0)
        told = f"{min(self.queued, self.batch)} of {self.batch} groups for this batch, "
        told += f"{dropped} dropped" + (f", {failures.total()} lost" if failures else "")
        equal = f"{100 * (1 - self.kept_share):.0f} % have equal scores"
        return told if self.kept_share == 1 else f"{told}; of the newest, {equal}"

    def report_if_due(self) -> dict[str, Any] | None:
        """The fields of the next report; None if it is not due yet."""
        is_due = time.monotonic() - self._reported_at >= _REPORT_EVERY_S
        return self.report() if is_due else None

    def report(self) -> dict[str, Any]:
        """The fields of a report on the time since the previous one."""
        now, window, rewards = time.monotonic(), self._window, self._rewards
        elapsed_s = now - self._reported_at
        self._reported_at, self._window, self._rewards = now, Counter(), RewardTotals()
        self.reported = {
            "groups_sent": self.groups_sent,
            "failures": {reason.value: count for reason, count in sorted(self.failures.items())},
            "mean_reward": _ratio(rewards.sum, rewards.count),
            "reward_parts": {
                name: _ratio(total, rewards.count) for name, total in sorted(rewards.parts.items())
            },
            "mean_completion_tokens": _ratio(window["graded_tokens"], rewards.count),
            "equal_scores_share": _ratio(rewards.equal_groups, rewards.groups),
            "dropped_share": round(1 - self.kept_share, 4),
            "tokens_per_s": round(window["tokens"] / elapsed_s, 1) if elapsed_s else None,
        }
        return self.reported


def _ratio(part: float, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
