"""Opens the places where a run samples, and what brings new weights there."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from grpo_core.clients.inference import GenerateAnswer
from grpo_core.clients.service import AsyncServiceClient
from grpo_core.errors import ProtocolViolation, problems_of
from grpo_core.security import plain
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.tree.weights import served_weights_directory
from grpo_core.wire.policy_version import PolicyVersion
from grpo_env.assembly import TaskSet, engine_on, open_engine
from grpo_env.rollout.chat_template import ChatTemplate
from grpo_env.rollout.engine import RolloutEngine
from grpo_env.settings import EnvServerSettings
from grpo_runs.offline.backends.choice import Sampling
from grpo_runs.offline.backends.local import LocalGeneration, WeightsInProcess
from grpo_runs.offline.backends.sglang import SglangClient, SglangGeneration
from grpo_runs.offline.backends.sglang_weights import SglangWeights
from grpo_runs.offline.keys import OfflineKeys
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.model.policy import CausalLM
from grpo_trainer.weight_sync.base import WeightSync
from grpo_trainer.weight_sync.build import open_weight_sync
from grpo_trainer.weight_sync.files import WeightDirectories

_SERVICE = "vLLM"
_UNTRAINED = PolicyVersion(0, 0)
_NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Otherwise vLLM takes the model's own values."""


class _Choice(BaseModel):
    model_config = ConfigDict(extra="ignore")

    text: str
    finish_reason: str | None
    token_ids: list[int] | None = None


class _Answer(BaseModel):
    model_config = ConfigDict(extra="ignore")

    choices: list[_Choice]


class StockVllm(AsyncServiceClient):
    """A `CompletionSource`. Its logprobs are placeholders: vLLM logs them before the temperature.

    Args:
        url: for example http://127.0.0.1:30000
        model: the name under which the server serves the model
        deadline_s: seconds for all completions of a prompt
        requests: largest number of requests in flight
        api_key: if the server needs one
    """

    def __init__(
        self, url: str, model: str, deadline_s: float, requests: int, api_key: str | None = None
    ) -> None:
        super().__init__(_SERVICE, url, deadline_s, deadline_s, requests, api_key)
        self._model = model

    def session(self) -> StockVllm:
        return self

    async def generate(self, prompt_token_ids: list[int], **sampling: Any) -> GenerateAnswer:
        """Raises `RequestRefused`, `ServiceUnavailable`, `ProtocolViolation`."""
        body = {
            "model": self._model,
            "prompt": prompt_token_ids,
            "return_token_ids": True,
            **_NEUTRAL,
            **sampling,
        }
        response = await self.send("POST", "/v1/completions", json=body)
        try:
            choices = _Answer.model_validate_json(response.content).choices
        except ValidationError as error:
            raise ProtocolViolation(
                f"{_SERVICE} at {self.base_url}: the response from /v1/completions is invalid: "
                f"{problems_of(error)}"
            ) from error
        tokens = [choice.token_ids for choice in choices]
        if not all(tokens):
            raise ProtocolViolation(
                f"{_SERVICE} at {self.base_url} returns no token ids; use vLLM 0.10.2 or later, or "
                "vllm-api-server"
            )
        rows = [token_ids or [] for token_ids in tokens]
        return GenerateAnswer(
            text=[choice.text for choice in choices],
            prompt="",
            finish_reasons=[choice.finish_reason or "abort" for choice in choices],
            logprobs=[[[{token: 0.0}] for token in row] for row in rows],
            prompt_token_ids=prompt_token_ids,
            token_ids=rows,
            policy_version=[(_UNTRAINED, _UNTRAINED)] * len(rows),
        )


@contextlib.contextmanager
def open_weights(
    keys: OfflineKeys, sampling: Sampling, settings: TrainerSettings
) -> Iterator[WeightSync]:
    """Opens what brings new weights to where rollouts are sampled."""
    if sampling.mode in ("local", "frozen"):
        yield WeightsInProcess(settings, samples=sampling.mode == "local")
    elif sampling.mode == "sglang":
        key = plain(settings.vllm_api_key)
        weights = SglangWeights(
            server=SglangClient(settings.inference_url, settings.service_deadline_s, api_key=key),
            weights=TrainedWeights(settings.model, settings.lora),
            directories=WeightDirectories(served_weights_directory(settings.save_path)),
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
    """Opens the rollout engines of one run. Args: version: of the policy's weights"""

    keys: OfflineKeys
    sampling: Sampling
    environment: EnvServerSettings
    tasks: TaskSet
    template: ChatTemplate
    policy: CausalLM
    version: Callable[[], PolicyVersion]

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[tuple[RolloutEngine, RolloutEngine]]:
        """The engines for training and for evaluation. They are one if both sample from the same
        server."""
        generation, evaluation = self.keys.generation, self.keys.eval
        place = (evaluation.backend, evaluation.base_url)
        async with self._engine(generation.backend, self.environment, None) as training:
            if place == (generation.backend, generation.base_url) and place[0] != "local":
                yield training, training
                return
            other = self.environment.model_copy(update={"inference_url": (evaluation.base_url,)})
            async with self._engine(evaluation.backend, other, evaluation.seed_base) as evaluating:
                yield training, evaluating

    @contextlib.asynccontextmanager
    async def _engine(
        self, backend: str, environment: EnvServerSettings, seed: int | None
    ) -> AsyncIterator[RolloutEngine]:
        """Args:
        backend: as `generation.backend`
        environment: names the server
        seed: of the random numbers of `local`; None: those of the process
        """
        if backend == "local":
            local = LocalGeneration(self.policy, self.template.tokenizer, self.version, seed)
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
