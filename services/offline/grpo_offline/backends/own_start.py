"""Lets a run in mode shared_vllm begin with its own weights.

The server's memory may hold the weights of another run: of an earlier job of a sweep, for example.
"""

from __future__ import annotations

import torch

from grpo_core.clients.inference import Completion
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.config.trainer import TrainerSettings
from grpo_trainer.errors import ServedWeightsDiffer
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.model.policy import CausalLM
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.verify.alignment import Bound
from grpo_trainer.weight_sync.base import Published, WeightSync


class OwnStart:
    """A `WeightSync` that first publishes the weights of --model, unless a checkpoint replaces
    them."""

    def __init__(self, shared: WeightSync, settings: TrainerSettings) -> None:
        self._shared = shared
        self._settings = settings
        self._is_restoring = False
        self._policy: CausalLM
        self.begun_as: PolicyVersion | None = None  # always None: `start` publishes
        self.server_run_id: str | None = None

    def load_policy(self, restoring: bool = False) -> CausalLM:
        """Raises the errors of `SharedVllm.load_policy`, but for those of its weights."""
        self._is_restoring = restoring
        self._policy = self._shared.load_policy(restoring=True)
        self.server_run_id = self._shared.server_run_id
        return self._policy

    def start(
        self,
        optimizer: MasterOptimizer,
        step: int,
        last_epoch: int = 0,
        bound: Bound | None = None,
    ) -> PolicyVersion:
        """Raises `ServedWeightsDiffer`: layers that are not trained are those of another run."""
        if not self._is_restoring:
            self._replace_masters(optimizer)
        return self._shared.start(optimizer, step, last_epoch, bound)

    @torch.no_grad()
    def _replace_masters(self, optimizer: MasterOptimizer) -> None:
        dtype = next(self._policy.parameters()).dtype
        own = dict(TrainedWeights(self._settings.model).load(dtype).named_parameters())
        policy = dict(self._policy.named_parameters())
        frozen = [name for name, p in policy.items() if not p.requires_grad]
        if any(not torch.equal(policy[name].cpu(), own[name]) for name in frozen):
            raise ServedWeightsDiffer(
                "the server holds an earlier run's weights in layers that this run does not train "
                "(grpo.train_layer_indices); restart the server, so that it loads its model again"
            )
        trained = [name for name, p in policy.items() if p.requires_grad]
        for name, master in zip(trained, optimizer.masters, strict=True):
            master.copy_(own[name])

    def apply(self, optimizer: MasterOptimizer, step: int) -> Published:
        return self._shared.apply(optimizer, step)

    def recover_server(self) -> None:
        self._shared.recover_server()

    def served_logprobs(self, token_ids: list[int]) -> list[float]:
        return self._shared.served_logprobs(token_ids)

    def sample(self, prompt_token_ids: list[int], max_tokens: int) -> Completion:
        return self._shared.sample(prompt_token_ids, max_tokens)

    def close(self) -> None:
        self._shared.close()
