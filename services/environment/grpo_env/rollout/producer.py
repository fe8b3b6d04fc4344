"""Produces one group, from the prompt to the submission, and counts groups that fail."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from grpo_core.clients.run_api import EnvironmentClient
from grpo_core.errors import GrpoError, RequestRefused, ServiceUnavailable
from grpo_core.wire.scored_group import RolloutFacts, ScoredGroup
from grpo_env.pacing.failure_budget import FailureBudget, RefusalLimit
from grpo_env.pacing.flat_rewards import FlatRewards
from grpo_env.pacing.reward_failures import RewardFailures
from grpo_env.rollout.outcome import FailureReason, Rollout, RolloutFailure, SamplingPlan
from grpo_env.rollout.progress import Progress, RewardSample
from grpo_env.rollout.rollout import RolloutEngine
from grpo_env.tasks.items import ItemStream

log = structlog.get_logger()

_CONFLICT = 409


class NoPromptFits(GrpoError):
    """Every prompt of the data set is too long."""


@dataclass(frozen=True)
class Sender:
    """The environment as run-api knows it, and the run in which it registered."""

    env_id: int = -1
    run_uuid: str = ""


class GroupProducer:
    """Samples and submits groups.

    The caller shares `inference` and `submissions`, and starts no groups while either is failing.
    """

    def __init__(
        self,
        items: ItemStream,
        engine: RolloutEngine,
        api: EnvironmentClient,
        inference: FailureBudget,
        submissions: FailureBudget,
        reward_failures: RewardFailures,
    ) -> None:
        self._items = items
        self._engine = engine
        self._api = api
        self._inference = inference
        self._submissions = submissions
        self._reward_failures = reward_failures
        self._flat_rewards = FlatRewards()
        self._rewards = RewardSample()
        self._generation_refusals = RefusalLimit("the inference server")
        self._submission_refusals = RefusalLimit("run-api")
        self.sender = Sender()
        self.progress = Progress()

    def skip_long_prompts(self, plan: SamplingPlan) -> None:
        """Drop prompts that leave too little room for a whole completion, which would be cut off
        before its result. This encodes the whole data set.

        Raises:
            NoPromptFits: no prompt leaves enough room.
        """
        count = self._items.keep(
            lambda item: len(self._engine.prompt_ids(item)) <= plan.longest_prompt(item.task)
        )
        if count.emptied:
            raise NoPromptFits(
                f"{', '.join(count.emptied)}: all prompts are too long: a prompt and its longest "
                f"completion must together have fewer than {plan.max_token_length} tokens; raise "
                "--seq-len of the environment and of the trainer, or lower --max-completion-tokens"
            )
        log.info(
            "prompts.filtered",
            kept=count.kept,
            too_long=count.skipped,
            seq_len=plan.max_token_length,
        )

    async def produce(self, plan: SamplingPlan) -> None:
        """Sample one group and submit it, or count the reason why it was lost.

        Raises:
            EveryGroupRefused: a server refused every recent group.
            RewardsFail: too many groups could not be graded.
            ServiceUnavailable: a server failed for longer than its deadline.
            ProtocolViolation, MisalignedCompletion: a server's answer is not valid.
        """
        sender = self.sender  # of the run in which the sampling begins
        try:
            outcome = await self._engine.roll_out(self._items.next(), plan)
        except ServiceUnavailable as error:
            self._inference.failed(error)
            self._fail(RolloutFailure(FailureReason.UNAVAILABLE, str(error)))
            return
        self._inference.succeeded()
        self._rewards.add(outcome.grades)
        self._flat_rewards.graded(grade.score for grade in outcome.grades)
        self._observe_grading(outcome)
        if isinstance(outcome, Rollout):
            self._generation_refusals.accepted()
            self.progress.record(outcome)
            await self._send(outcome, sender)
            return
        self._fail(outcome)
        if outcome.reason is FailureReason.REFUSED:
            self._generation_refusals.refused(outcome.detail)
        else:
            self._generation_refusals.accepted()

    def _observe_grading(self, outcome: Rollout | RolloutFailure) -> None:
        if not isinstance(outcome, RolloutFailure):
            self._reward_failures.graded()
        elif outcome.reason is FailureReason.QUARANTINED_REWARD:
            self._reward_failures.failed(outcome.detail)
        elif outcome.grades:
            self._reward_failures.graded()

    async def _send(self, rollout: Rollout, sender: Sender) -> None:
        rewards = self._rewards.take()
        try:
            group = self._addressed(rollout.group, rewards, sender.env_id)
            await self._api.submit(group, sender.run_uuid)
        except RequestRefused as error:
            self._rewards.give_back(rewards)
            self._fail(RolloutFailure(FailureReason.REFUSED, str(error)))
            # A conflict means that run-api was reset meanwhile. The next poll detects that.
            if error.status != _CONFLICT:
                self._submission_refusals.refused(str(error))
        except ServiceUnavailable as error:
            # The client repeated the submission for as long as run-api keeps idempotency keys. It
            # may have arrived, so neither the group nor its rewards are sent again: a gap is
            # harmless, but a duplicate is not.
            self._submissions.failed(error)
            self._fail(RolloutFailure(FailureReason.UNDELIVERED, str(error)))
        else:
            self._submissions.succeeded()
            self._submission_refusals.accepted()
            self.progress.groups_sent += 1

    def _addressed(self, group: ScoredGroup, rewards: RewardSample, env_id: int) -> ScoredGroup:
        facts = RolloutFacts(reward_sample=rewards.on_the_wire())
        overrides = (group.group_overrides or {}) | facts.on_the_wire()
        return group.model_copy(update={"env_id": env_id, "group_overrides": overrides})

    def _fail(self, failure: RolloutFailure) -> None:
        self.progress.record(failure)
        # Equal scores are normal for a good policy, so only the regular report counts them.
        if failure.reason is not FailureReason.EQUAL_SCORES:
            log.warning("group.lost", reason=failure.reason.value, detail=failure.detail)
