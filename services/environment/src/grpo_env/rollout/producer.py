"""Produces one group, from the prompt to the submission, and counts groups that fail."""

from __future__ import annotations

import structlog

from grpo_core.clients.run_api import EnvironmentClient
from grpo_core.errors import GrpoError, RequestRefused, ServiceUnavailable
from grpo_core.wire.scored_group import RolloutFacts, ScoredGroup
from grpo_env.pacing.failure_budget import FailureBudget, RefusalLimit
from grpo_env.rollout.chat_template import Encode
from grpo_env.rollout.progress import Progress, RewardSample
from grpo_env.rollout.rollout import (
    FailureReason,
    Generation,
    Rollout,
    RolloutFailure,
    SamplingPlan,
    roll_out,
)
from grpo_env.tasks import DatasetTask, Task

log = structlog.get_logger()

_CONFLICT = 409


class NoPromptFits(GrpoError):
    """Every prompt of the data set is too long."""


class GroupProducer:
    """Samples and submits groups of one task.

    The caller shares `inference` and `submissions`, and starts no groups while either is failing.
    """

    def __init__(
        self,
        task: Task,
        encode: Encode,
        generation: Generation,
        api: EnvironmentClient,
        inference: FailureBudget,
        submissions: FailureBudget,
    ) -> None:
        self._task = task
        self._encode = encode
        self._generation = generation
        self._api = api
        self._inference = inference
        self._submissions = submissions
        self._rewards = RewardSample()
        self._generation_refusals = RefusalLimit("the inference server")
        self._submission_refusals = RefusalLimit("run-api")
        self.env_id = -1
        self.progress = Progress()

    def skip_long_prompts(self, plan: SamplingPlan) -> None:
        """Drop prompts that leave too little room for a whole completion, which would be cut off
        before its result. This encodes the whole data set.

        Raises:
            NoPromptFits: no prompt leaves enough room.
        """
        if not isinstance(self._task, DatasetTask):
            return
        most_tokens = plan.max_token_length - plan.max_completion_tokens - 1
        count = self._task.keep(lambda item: len(self._encode(item.messages)) <= most_tokens)
        if not count.kept:
            raise NoPromptFits(
                f"all {count.skipped} prompts are too long: a prompt and its completion of up to "
                f"{plan.max_completion_tokens} tokens must together have fewer than "
                f"{plan.max_token_length} tokens; raise --seq-len of the environment and of the "
                "trainer, or lower --max-completion-tokens"
            )
        log.info(
            "prompts.filtered",
            kept=count.kept,
            too_long=count.skipped,
            limit_tokens=max(most_tokens, 0),
        )

    async def produce(self, plan: SamplingPlan) -> None:
        """Sample one group and submit it, or count the reason why it was lost.

        Raises:
            EveryGroupRefused: a server refused every recent group.
            ServiceUnavailable: a server failed for longer than its deadline.
            ProtocolViolation, MisalignedCompletion: a server's answer is not valid.
        """
        item = self._task.next_item()
        try:
            outcome = await roll_out(self._generation, item, self._encode(item.messages), plan)
        except ServiceUnavailable as error:
            self._inference.failed(error)
            self._fail(RolloutFailure(FailureReason.UNAVAILABLE, str(error)))
            return
        self._inference.succeeded()
        self._rewards.add(outcome.rewards)
        if isinstance(outcome, Rollout):
            self._generation_refusals.accepted()
            self.progress.record(outcome)
            await self._send(outcome)
            return
        self._fail(outcome)
        if outcome.reason is FailureReason.REFUSED:
            self._generation_refusals.refused(outcome.detail)
        else:
            self._generation_refusals.accepted()

    async def _send(self, rollout: Rollout) -> None:
        rewards = self._rewards.take()
        try:
            await self._api.submit(self._addressed(rollout.group, rewards))
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

    def _addressed(self, group: ScoredGroup, rewards: RewardSample) -> ScoredGroup:
        facts = RolloutFacts(reward_sample=rewards.on_the_wire())
        overrides = (group.group_overrides or {}) | facts.on_the_wire()
        return group.model_copy(update={"env_id": self.env_id, "group_overrides": overrides})

    def _fail(self, failure: RolloutFailure) -> None:
        self.progress.record(failure)
        # Equal scores are normal for a good policy, so only the regular report counts them.
        if failure.reason is not FailureReason.EQUAL_SCORES:
            log.warning("group.lost", reason=failure.reason.value, detail=failure.detail)
