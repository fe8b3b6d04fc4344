"""Publishes the trained weights to an SGLang server, which loads them from a directory."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import structlog
import torch

from grpo_core.clients.inference import Completion
from grpo_core.weights.ref import WeightKind
from grpo_core.wire.policy_version import PolicyVersion
from grpo_offline.backends.sglang import UNTRAINED, ServerInfo, SglangClient
from grpo_offline.errors import ServerUnsuitable
from grpo_trainer.checks.served_weights import (
    DEFAULT_BLOCK,
    Alignment,
    Bound,
    ProbeLengths,
    PublicationCheck,
)
from grpo_trainer.errors import PolicyMismatch, ServedWeightsDiffer
from grpo_trainer.model.loading import TrainedWeights, device_to_load_on, import_architecture
from grpo_trainer.model.policy import CausalLM
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.weight_sync.base import PeriodicSync
from grpo_trainer.weight_sync.publisher import WeightDirectories

log = structlog.get_logger()

AUTO = "auto"


@dataclass(eq=False)
class SglangWeights(PeriodicSync):
    """A `WeightSync`. Every run first publishes its own weights.

    Args:
        server: the trainer's client
        weights: what is trained
        directories: where the weights are written; the server must see the same path
        dtype: the data type of the weights; "auto" for the server's
        device: the device to train on; "auto" takes a GPU if there is one
        every_steps, last_step: publish after every `every_steps` steps and after `last_step`
    """

    server: SglangClient
    weights: TrainedWeights
    directories: WeightDirectories
    dtype: str
    device: str
    every_steps: int
    last_step: int
    begun_as: PolicyVersion | None = field(init=False, default=None)  # `start` publishes
    server_run_id: str | None = field(init=False, default=None)
    _policy: CausalLM = field(init=False)
    _check: PublicationCheck = field(init=False)
    version: PolicyVersion = field(init=False, default=UNTRAINED)
    _served: PolicyVersion = field(init=False, default=UNTRAINED)

    def load_policy(self, restoring: bool = False) -> CausalLM:  # noqa: ARG002
        """Load the model from disk.

        Raises:
            ServiceUnavailable: no server answers.
            ServerUnsuitable: an adapter is to be trained.
            PolicyMismatch: the server has another data type.
            NoSuchDevice: the GPU to train on does not exist.
        """
        if self.weights.lora is not None:
            raise ServerUnsuitable(
                f"an adapter cannot be published to SGLang at {self.server.base_url}; train the "
                "whole model: remove the LoRA options. Or start vllm-api-server with "
                "--enable-lora, and set generation.backend=vllm_server and sync.mode=lora_only"
            )
        device = device_to_load_on(self.device)
        info = self.server.info()
        dtype = _dtype_to_load(self.dtype, info)
        import_architecture(self.weights.model_name)
        self._policy = self.weights.load(dtype, device).eval()
        block = max(info.page_size or 0, DEFAULT_BLOCK)
        lengths = ProbeLengths.fitting(block, info.max_req_input_len)
        self._check = PublicationCheck(self._policy, self, lengths)
        return self._policy

    def start(
        self,
        optimizer: MasterOptimizer,
        step: int,
        last_epoch: int = 0,
        bound: Bound | None = None,
    ) -> PolicyVersion:
        """Publish the master weights under a new epoch: later than the server's, than `last_epoch`
        and than that of every directory."""
        if bound is not None:
            self._check.bound = bound
        optimizer.write_into_parameters()
        self.directories.prepare()
        served = self.server.weight_version() or UNTRAINED
        epoch = 1 + max(last_epoch, served.epoch, self.directories.newest_epoch())
        self.version = PolicyVersion(epoch, step)
        self.publish_now("At the start")
        return self.version

    def recover_server(self) -> None:
        """Publish the weights again if the server restarted; else check that it still serves them.

        Raises:
            ServiceUnavailable: no server answers.
            ServedWeightsDiffer: it serves other weights.
        """
        served = self.server.weight_version()
        if served is None:
            log.warning("weights.lost", lost_policy_version=tuple(self._served))
            self.publish_now("After a restart of the server")
        elif served != self._served:
            raise ServedWeightsDiffer(
                f"SGLang at {self.server.base_url} serves policy version {served}, but this run "
                f"published {self._served}: another run publishes to this server. Give each run a "
                "server of its own, or start the runs one after the other"
            )
        elif self.version == self._served:
            self._check.require(served, "Since the publication")

    def served_logprobs(self, token_ids: list[int]) -> list[float]:
        """Raises `ServiceUnavailable`, `ProtocolViolation`."""
        return self.server.prompt_logprobs(token_ids)

    def sample(self, prompt_token_ids: list[int], max_tokens: int) -> Completion:
        """Sample exactly `max_tokens` tokens at temperature 1. Raises as `served_logprobs`."""
        return self.server.sample(prompt_token_ids, max_tokens=max_tokens, ignore_eos=True)

    def close(self) -> None:
        self.server.close()

    def publish_now(self, label: str) -> Alignment:
        """Write the policy's weights into a directory, and let the server load them.

        Raises:
            CheckpointNotSaved, WeightsRefused, ServiceUnavailable: the server serves the previous
                weights, or none.
            ServedWeightsDiffer: the server reports the new weights but does not serve them.
        """
        started, version = time.monotonic(), self.version
        files = self.directories.write(
            version, WeightKind.CHECKPOINT, lambda to: self.weights.write(self._policy, to)
        )
        assert files.path is not None, "a checkpoint has a directory"
        self._check.prime()
        self.server.load_weights(files.path.absolute(), version)
        alignment = self._check.require(version, label)
        self._served = version
        self.directories.remove_older(())
        log.info(
            "weights.published",
            policy_version=tuple(version),
            seconds=round(time.monotonic() - started, 2),
            logprob_difference=alignment.mean,
        )
        return alignment


def _dtype_to_load(wanted: str, info: ServerInfo) -> torch.dtype:
    """The data type to load the model in. If SGLang derives its own from the model, the first
    publication compares both.

    Args:
        wanted: "auto" for the server's

    Raises:
        PolicyMismatch: the server has another one, or does not name its own.
    """
    served = info.torch_dtype
    chosen = served if wanted == AUTO else wanted
    if chosen is None:
        raise PolicyMismatch(
            "SGLang derives the data type of its weights from the model, so the trainer cannot "
            "take the same one: start the server with --dtype bfloat16, or set model.dtype"
        )
    if served not in (None, chosen):
        raise PolicyMismatch(
            f"model.dtype={chosen}, but SGLang serves weights in {served}: start the server with "
            f"--dtype {chosen}, or set model.dtype={served}"
        )
    dtype: torch.dtype = getattr(torch, chosen)
    return dtype
