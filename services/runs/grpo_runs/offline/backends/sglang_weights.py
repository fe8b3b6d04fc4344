"""Publishes the trained weights to an SGLang server, which loads them from a directory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import structlog
import torch

from grpo_core.clients.inference import Completion
from grpo_core.weights.ref import WeightRef
from grpo_core.wire.policy_version import PolicyVersion
from grpo_runs.offline.backends.sglang import UNTRAINED, ServerInfo, SglangClient
from grpo_runs.offline.errors import ServerUnsuitable
from grpo_trainer.checks.served_weights import (
    DEFAULT_BLOCK,
    Bound,
    ProbeLengths,
)
from grpo_trainer.errors import PolicyMismatch, ServedWeightsDiffer
from grpo_trainer.model.loading import device_to_load_on, import_architecture
from grpo_trainer.model.policy import CausalLM
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.weight_sync.files import DirectorySync

log = structlog.get_logger()

AUTO = "auto"


@dataclass(eq=False, kw_only=True)
class SglangWeights(DirectorySync):
    """A `WeightSync`. Every run first publishes its own weights.

    Args:
        server: the trainer's client
    """

    server: SglangClient
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
        block = max(info.page_size or 0, DEFAULT_BLOCK)
        lengths = ProbeLengths.fitting(block, info.max_req_input_len)
        return self._loaded(dtype, device, lengths)

    def start(
        self,
        optimizer: MasterOptimizer,
        step: int,
        last_epoch: int = 0,
        bound: Bound | None = None,
    ) -> PolicyVersion:
        """Publish the master weights under a new epoch: later than the server's, than `last_epoch`
        and than that of every directory."""
        served = self.server.weight_version() or UNTRAINED
        self._begin(optimizer, step, bound, (last_epoch, served.epoch))
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

    def _load(self, files: WeightRef) -> frozenset[Path]:
        """Raises `WeightsRefused`, `ServiceUnavailable`: the server serves the previous weights, or
        none."""
        assert files.path is not None, "a checkpoint has a directory"
        self.server.load_weights(files.path.absolute(), self.version)
        self._served = self.version
        return frozenset()


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
