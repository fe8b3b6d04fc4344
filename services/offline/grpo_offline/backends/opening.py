"""Opens the places where a run samples, and what brings new weights there."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from grpo_core.security import plain
from grpo_core.wire.policy_version import PolicyVersion
from grpo_env.assembly import TaskSet, engine_on, open_engine
from grpo_env.rollout.chat_template import ChatTemplate
from grpo_env.rollout.engine import RolloutEngine
from grpo_env.settings import EnvServerSettings
from grpo_offline.backends.choice import Sampling
from grpo_offline.backends.in_process import WeightsInProcess
from grpo_offline.backends.local import LocalGeneration
from grpo_offline.backends.sglang_client import SglangClient
from grpo_offline.backends.sglang_generation import SglangGeneration
from grpo_offline.backends.sglang_weights import SglangWeights
from grpo_offline.backends.stock_vllm import StockVllm
from grpo_offline.keys import OfflineKeys
from grpo_trainer.config.sync import served_weights_directory
from grpo_trainer.config.trainer import TrainerSettings
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.model.policy import CausalLM
from grpo_trainer.weight_sync.base import WeightSync
from grpo_trainer.weight_sync.build import open_weight_sync
from grpo_trainer.weight_sync.files import WeightDirectories


@dataclass(frozen=True)
class Backends:
    """Those of one run."""

    keys: OfflineKeys
    sampling: Sampling
    tasks: TaskSet
    template: ChatTemplate

    @contextlib.contextmanager
    def weight_sync(self, settings: TrainerSettings) -> Iterator[WeightSync]:
        """Opens what brings new weights to where rollouts are sampled."""
        if self.sampling.mode in ("local", "frozen"):
            yield WeightsInProcess(settings, samples=self.sampling.mode == "local")
            return
        if self.sampling.mode == "sglang":
            with contextlib.closing(self._sglang_weights(settings)) as weights:
                yield weights
            return
        with open_weight_sync(settings, starts_from_model=True) as sync:
            yield sync

    def _sglang_weights(self, settings: TrainerSettings) -> SglangWeights:
        key = plain(settings.vllm_api_key)
        return SglangWeights(
            server=SglangClient(settings.inference_url, settings.service_deadline_s, api_key=key),
            weights=TrainedWeights(settings.model, settings.lora),
            directories=WeightDirectories(served_weights_directory(settings.save_path)),
            dtype=settings.dtype,
            device=settings.device,
            every_steps=self.keys.steps_per_iteration,
            last_step=settings.steps,
        )

    @contextlib.asynccontextmanager
    async def engine(
        self,
        policy: CausalLM,
        version: Callable[[], PolicyVersion],
        backend: str,
        environment: EnvServerSettings,
        seed: int | None = None,
    ) -> AsyncIterator[RolloutEngine]:
        """The rollout engine on one place where rollouts are sampled.

        Args:
            policy, version: of the trainer, for `local`
            backend: as `generation.backend`
            environment: names the server
            seed: of the random numbers of `local`; None: those of the process
        """
        if backend == "local":
            local = LocalGeneration(policy, self.template.tokenizer, version, seed)
            with engine_on(local, environment, self.template) as engine:
                yield engine
        elif backend == "sglang_server" or self.sampling.server == "stock_vllm":
            async with self._client(backend, environment) as generation:
                with engine_on(generation, environment, self.template) as engine:
                    yield engine
        else:
            async with open_engine(environment, self.tasks, self.template) as engine:
                yield engine

    def _client(self, backend: str, environment: EnvServerSettings) -> SglangGeneration | StockVllm:
        """Of a server that is not ours."""
        url, deadline_s = environment.inference_url[0], environment.request_deadline_s
        requests = max(self.keys.generation.batch_size, self.keys.eval.batch_size)
        key = plain(environment.vllm_api_key)
        if backend == "sglang_server":
            return SglangGeneration(url, deadline_s, requests, key)
        return StockVllm(url, self.keys.model.train_id, deadline_s, requests, key)
