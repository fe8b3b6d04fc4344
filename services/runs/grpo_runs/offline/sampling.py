"""Opens the engines that sample and what brings new weights to them, and samples the rollouts of an
iteration from the trainer's weights alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import structlog
import torch

from grpo_core.security import plain
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.tree.weights import served_weights_directory
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.scored_group import RolloutFacts, ScoredGroup
from grpo_env.assembly import TaskSet, engine_on, open_engine
from grpo_env.pacing import RolloutsFail
from grpo_env.rollout.chat_template import ChatTemplate
from grpo_env.rollout.engine import RolloutEngine, all_or_none
from grpo_env.rollout.groups import GroupLost, SampledGroup, SamplingPlan
from grpo_env.settings import EnvServerSettings
from grpo_env.tasks.item_stream import ItemStream
from grpo_env.tasks.items import Item
from grpo_runs.offline.errors import StaleServer
from grpo_runs.offline.keys import OfflineKeys
from grpo_runs.offline.local import LocalGeneration, WeightsInProcess
from grpo_runs.offline.servers import Sampling, StockVllm
from grpo_runs.offline.sglang import (
    HINT,
    SERVICE,
    SglangClient,
    SglangGeneration,
    SglangWeights,
)
from grpo_trainer.checks.served_weights import START_FACTOR
from grpo_trainer.data.batches import Position
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.model.logprobs import logprobs_of, probe_tokens, tolerance_of
from grpo_trainer.model.policy import CausalLM, vocabulary_of
from grpo_trainer.token_table import mean_distance
from grpo_trainer.weight_sync.base import WeightSync
from grpo_trainer.weight_sync.build import open_weight_sync
from grpo_trainer.weight_sync.directories import VersionDirectories

log = structlog.get_logger()

_TRIES = 3
"""An iteration may try this number of times as many groups as it needs."""
PROMPT_TOKENS, SAMPLED_TOKENS = 16, 8
"""Of `require_own_policy`."""


@contextlib.contextmanager
def open_weights(
    keys: OfflineKeys, sampling: Sampling, settings: TrainerSettings
) -> Iterator[WeightSync]:
    """Opens what brings new weights to where rollouts are sampled."""
    if sampling.mode in ("local", "frozen"):
        yield WeightsInProcess(settings, samples=sampling.mode == "local")
    elif sampling.mode == "sglang":
        key = plain(settings.vllm_api_key)
        url, deadline_s = settings.inference_url, settings.service_deadline_s
        weights = SglangWeights(
            server=SglangClient(SERVICE, url, deadline_s, deadline_s, key, HINT),
            weights=TrainedWeights.of(settings),
            directories=VersionDirectories(served_weights_directory(settings.save_path)),
            dtype=settings.dtype,
            device=settings.device,
            every_steps=keys.steps_per_iteration,
            last_step=settings.steps,
        )
        with contextlib.closing(weights):
            yield weights
    else:
        with open_weight_sync(settings, starts_from_model=True) as sync:
            yield sync


@dataclass(frozen=True)
class Engines:
    """Opens the rollout engines of one run."""

    keys: OfflineKeys
    sampling: Sampling
    environment: EnvServerSettings
    tasks: TaskSet
    template: ChatTemplate

    @contextlib.asynccontextmanager
    async def opened(
        self, policy: CausalLM, version: Callable[[], PolicyVersion]
    ) -> AsyncIterator[tuple[RolloutEngine, RolloutEngine]]:
        """The engines for training and for evaluation. They are one if both sample from the same
        server.

        Args:
            version: of the policy's weights
        """
        generation, evaluation = self.keys.generation, self.keys.eval
        local = partial(LocalGeneration, policy, self.template.tokenizer, version)
        place = (evaluation.backend, evaluation.base_url)
        async with self._engine(generation.backend, self.environment, local) as training:
            if place == (generation.backend, generation.base_url) and place[0] != "local":
                yield training, training
                return
            other = self.environment.model_copy(update={"inference_url": (evaluation.base_url,)})
            local = partial(local, evaluation.seed_base)
            async with self._engine(evaluation.backend, other, local) as evaluating:
                yield training, evaluating

    @contextlib.asynccontextmanager
    async def _engine(
        self, backend: str, environment: EnvServerSettings, local: Callable[[], LocalGeneration]
    ) -> AsyncIterator[RolloutEngine]:
        """Open the engine that samples.

        Args:
            backend: as `generation.backend`
            environment: names the server
        """
        if backend == "vllm_server" and self.sampling.server != "stock_vllm":
            async with open_engine(environment, self.tasks, self.template) as (engine, _):
                yield engine
            return
        source = nullcontext(local()) if backend == "local" else self._client(backend, environment)
        async with source as generation:
            with engine_on(generation.generate, environment, self.template) as engine:
                yield engine

    def _client(self, backend: str, environment: EnvServerSettings) -> SglangGeneration | StockVllm:
        """Connect to a server that is not ours."""
        url, deadline_s = environment.inference_url[0], environment.request_deadline_s
        requests = max(self.keys.generation.batch_size, self.keys.eval.batch_size)
        key = plain(environment.vllm_api_key)
        if backend == "sglang_server":
            return SglangGeneration(SERVICE, url, deadline_s, deadline_s, requests, key, HINT)
        return StockVllm(url, self.keys.model.train_id, deadline_s, requests, key)


@dataclass
class TrainedVersion:
    """The version of the trainer's weights, with which rollouts and evaluations are compared.

    `begun_as`: another name of the weights at the start of the run, if the server has one.
    """

    position: Position
    begun_as: PolicyVersion | None

    def __call__(self) -> PolicyVersion:
        return PolicyVersion(self.position.epoch, self.position.step)

    @property
    def accepted(self) -> set[PolicyVersion]:
        return {self()} | ({self.begun_as} if self.begun_as else set())

    def trained(self, position: Position) -> None:
        """The weights are new ones now."""
        self.position, self.begun_as = position, None


@dataclass(frozen=True)
class Sampler:
    """Samples and grades groups.

    Args:
        requests: largest number of groups that are sampled at the same time
        has_logprobs: the server's logprobs are those of the distribution that is sampled from
    """

    engine: RolloutEngine
    plan: SamplingPlan
    requests: int
    has_logprobs: bool

    async def groups(self, items: Sequence[Item], spare: ItemStream) -> list[ScoredGroup]:
        """Sample one group for each item. A group that is lost is replaced.

        Args:
            spare: items for the replacements
        Raises:
            RolloutsFail: two of three groups are lost.
            ServiceUnavailable, ProtocolViolation: the errors of `RolloutEngine.roll_out`.
        """
        placeholders = {} if self.has_logprobs else {"inference_logprobs": None}
        found: list[ScoredGroup] = []
        lost: list[GroupLost] = []
        next_items = items
        while next_items:
            for sampled in await self._all(next_items):
                if sampled.lost is None:
                    assert sampled.group is not None
                    found.append(sampled.group.without_padding().model_copy(update=placeholders))
                else:
                    lost.append(sampled.lost)
                    reason, detail = sampled.lost.reason.value, sampled.lost.detail
                    log.warning("group.lost", reason=reason, detail=detail)
            if len(lost) > (_TRIES - 1) * len(items):
                reasons = "; ".join(dict.fromkeys(one.detail for one in lost[-3:]))
                raise RolloutsFail(
                    f"{len(lost)} of {len(lost) + len(found)} groups of an iteration were lost, "
                    f"the last ones because: {reasons}"
                )
            next_items = [spare.next() for _ in range(len(items) - len(found))]
        return found

    async def _all(self, items: Sequence[Item]) -> list[SampledGroup]:
        places = asyncio.Semaphore(self.requests)

        async def one(item: Item) -> SampledGroup:
            async with places:
                return await self.engine.roll_out(item, self.plan)

        return await all_or_none(one(item) for item in items)


def versions_of(groups: Sequence[ScoredGroup]) -> set[PolicyVersion]:
    """Those of the first and of the last tokens."""
    return {
        version
        for group in groups
        for pair in RolloutFacts.of(group).policy_version
        for version in pair
    }


def require_fresh(
    found: set[PolicyVersion], accepted: set[PolicyVersion], what: str = "rollouts"
) -> None:
    """Check that all tokens were sampled from the trainer's weights.

    Args: accepted: their version, and other names of it

    Raises:
        StaleServer: some were not.
    """
    if others := sorted(found - accepted):
        raise StaleServer(
            f"{what} were sampled from policy version {tuple(others[0])}, but the trainer holds "
            f"version {tuple(max(accepted))}: another program publishes to this server, or "
            "eval.base_url is a server that gets no new weights. Give the run a server of its own, "
            "or set sync.mode=frozen to train on the rollouts of another model"
        )


async def require_own_policy(engine: RolloutEngine, policy: CausalLM) -> None:
    """Compare a few tokens, sampled at temperature 1, with the trainer's policy.

    The logprobs of rollouts that are sampled with top_p, top_k or a repetition penalty are not
    those of the policy, so the trainer's own check of rollouts is off then. This one needs no
    rollout.

    Raises:
        StaleServer: the logprobs of sampled tokens are not the policy's.
        ServiceUnavailable, ProtocolViolation: the errors of `RolloutEngine.sample_plainly`.
    """
    prompt = probe_tokens(vocabulary_of(policy), PROMPT_TOKENS)
    completion = await engine.sample_plainly(prompt, SAMPLED_TOKENS)
    ours = logprobs_of(policy, [*prompt, *completion.token_ids])[len(prompt) - 1 :]  # [K]
    off = mean_distance(ours, torch.tensor(completion.logprobs))
    allowed = START_FACTOR * tolerance_of(policy)
    if not off <= allowed:
        raise StaleServer(
            f"the logprobs of {len(completion.token_ids)} tokens, sampled at temperature 1 before "
            f"the rollouts of this iteration, differ from those of the trainer's policy by "
            f"{off:.2g} on average (allowed {allowed:.2g}), so the rollouts would not be the "
            "policy's. Check that generation.base_url is the server of this run; with "
            "generation.backend=local, report a bug"
        )
