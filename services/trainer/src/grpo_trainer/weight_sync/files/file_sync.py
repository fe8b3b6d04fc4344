"""Modes `lora_only`, `lora_restart` and `none`: the trainer has weights of its own, and hands them
to the server as files, every so many steps.

What differs between the three is what is trained (`TrainedWeights`) and how the server takes it
(the `Action` of the hand-off). The server brings back by itself what it served last, so all that
the trainer needs for a server that crashes is patience.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import structlog
import torch

from grpo_core.clients.inference import BridgeClient, BridgeInfo, Completion
from grpo_core.clients.supervisor import SupervisorClient
from grpo_core.deadline import Deadline
from grpo_core.errors import ServiceUnavailable
from grpo_core.weights.ref import WeightKind
from grpo_core.weights.supervisor_protocol import SupervisorStatus
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.errors import PolicyMismatch
from grpo_trainer.model.loading import TrainedWeights, device_to_load_on, import_architecture
from grpo_trainer.model.policy_protocol import CausalLM
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.verify.alignment import Alignment, Bound
from grpo_trainer.verify.publication import ProbeLengths, PublicationCheck
from grpo_trainer.weight_sync.base import Published
from grpo_trainer.weight_sync.files.server_monitor import POLL_S, ServerMonitor
from grpo_trainer.weight_sync.files.supervisor_commands import Publisher
from grpo_trainer.weight_sync.files.weight_directories import WeightDirectories

log = structlog.get_logger()

T = TypeVar("T")

PROBE_DEADLINE_S = 30.0


@dataclass(eq=False)
class FileSync:
    """Args:
    bridge: asks the server
    supervisor: of that server
    monitor: of that server
    publisher: has it serve a directory
    weights: what is trained
    directories: directories of them
    dtype: what the server must hold; "auto": whatever it holds
    device: to train on; "auto": a GPU where there is one
    every_steps, last_step: weights are published after every so many steps, and after the last
    """

    bridge: BridgeClient
    supervisor: SupervisorClient
    monitor: ServerMonitor
    publisher: Publisher
    weights: TrainedWeights
    directories: WeightDirectories
    dtype: str
    device: str
    every_steps: int
    last_step: int
    begun_as: PolicyVersion | None = field(init=False, default=None)
    _policy: CausalLM = field(init=False)
    _check: PublicationCheck = field(init=False)
    _epoch: int = field(init=False, default=0)

    def load_policy(self, restoring: bool = False) -> CausalLM:  # noqa: ARG002
        """The model of --model-name, and in the LoRA modes an adapter that changes nothing yet.

        Raises:
            ServiceUnavailable, LostServer: no server, or nobody who hands weights to it.
            PolicyMismatch: the server is not one of this mode, data type or run.
            NoSuchDevice: there is no such GPU to train on.
        """
        device = device_to_load_on(self.device)
        import_architecture(self.weights.model_name)
        info = self.bridge.info()
        _require_server(self.bridge.base_url, info, self.weights.kind)
        dtype = _dtype_to_load(self.dtype, info)
        self._agreed_status(info)
        self._policy = self.weights.load(dtype, device).eval()
        lengths = ProbeLengths.fitting(info.kv_block_size, info.max_model_len)
        self._check = PublicationCheck(self._policy, self, lengths)
        return self._policy

    def start(
        self,
        optimizer: MasterOptimizer,
        step: int,
        last_epoch: int = 0,
        bound: Bound | None = None,
    ) -> PolicyVersion:
        """Open an epoch beyond every one that is known of, and publish, unless the server serves
        these very weights already."""
        if bound is not None:
            self._check.bound = bound
        status = self.monitor.await_serving()
        is_untrained = optimizer.unwritten_parameters() == 0
        optimizer.write_into_parameters()
        self.directories.prepare()
        self._epoch = 1 + max(
            last_epoch,
            status.epoch,
            self.directories.newest_epoch(),
            self.supervisor.newest_epoch(),
        )
        version = PolicyVersion(self._epoch, step)
        # Even what the server has already, where that costs next to nothing.
        if not self.publisher.action.restarts or not self._has(status, is_untrained):
            self._publish(version)
        else:
            self.begun_as = status.version
            self._check.require(status.version, "At the start")
            log.info("the server has these weights already", served_as=tuple(status.version))
        return version

    def apply(self, optimizer: MasterOptimizer, step: int) -> Published:
        """Step on the masters, write them into the policy, and publish where that is due.

        Raises:
            NonFiniteGradient: nothing was changed.
            WeightsRefused, NotPublished, LostServer: the server serves the weights before, if any.
            ServedWeightsDiffer: it says that it serves the new ones, and does not.
        """
        started = time.monotonic()
        grad_norm = optimizer.step(step)
        optimizer.write_into_parameters()
        stepped = time.monotonic()
        version = PolicyVersion(self._epoch, step + 1)
        is_due = (step + 1) % self.every_steps == 0 or step + 1 == self.last_step
        alignment = self._publish(version) if is_due else None
        return Published(
            version=version,
            grad_norm=grad_norm,
            optimizer_s=stepped - started,
            publish_s=time.monotonic() - stepped if is_due else 0.0,
            is_served=is_due,
            alignment=alignment,
        )

    def recover_server(self) -> None:
        """Where the server is away: wait for its return. Raises `LostServer`."""
        self.monitor.look()

    def served_logprobs(self, token_ids: list[int]) -> list[float]:
        """Raises `ServiceUnavailable` where a server that says it serves does not answer for
        30 s, and as `recover_server`."""
        return self._while_serving(lambda: self.bridge.prompt_logprobs(token_ids))

    def sample(self, prompt_token_ids: list[int], max_tokens: int) -> Completion:
        """Raises as `served_logprobs`."""
        return self._while_serving(
            lambda: self.bridge.sample(
                prompt_token_ids, max_tokens=max_tokens, temperature=1.0, ignore_eos=True
            )
        )

    def close(self) -> None:
        self.supervisor.close()
        self.bridge.close()

    def _publish(self, version: PolicyVersion) -> Alignment:
        started = time.monotonic()
        files = self.directories.write(
            version,
            self.weights.kind,
            lambda to: self.weights.write(self._policy, to),
        )
        if not self.publisher.action.restarts:  # a restart empties the caches anyway
            self._check.prime()
        in_use = self.publisher.publish(files)
        alignment = self._check.require(version, f"After step {version.step}")
        self.directories.remove_older(in_use)
        log.info(
            "published",
            version=tuple(version),
            seconds=round(time.monotonic() - started, 2),
            difference=alignment.mean,
        )
        return alignment

    def _has(self, status: SupervisorStatus, is_untrained: bool) -> bool:
        """Does the server serve the policy's weights, whatever it calls them?"""
        served = status.weights
        if not served.trained:
            return is_untrained
        return (
            served.kind is self.weights.kind
            and served.path is not None
            and self.weights.are_in(self._policy, served.path)
        )

    def _agreed_status(self, info: BridgeInfo) -> SupervisorStatus:
        """Of the supervisor in Redis, once it is that of the server at our URL."""
        deadline = Deadline(self.supervisor.deadline_s)
        while True:
            status = self.monitor.await_serving()
            if status.version == info.policy_version:
                return status
            if deadline.has_passed:
                raise PolicyMismatch(
                    f"the server at {self.bridge.base_url} serves version "
                    f"{tuple(info.policy_version)}, and the one that reports for run "
                    f"{self.supervisor.run_id!r} in Redis "
                    f"{tuple(status.version)}: they are two. Give server and trainer the same "
                    "--redis-url and --run-id"
                )
            time.sleep(POLL_S)
            info = self.bridge.info()

    def _while_serving(self, ask: Callable[[], T]) -> T:
        """Ask again until the server answers; the time for which it is away does not count."""
        deadline = Deadline(PROBE_DEADLINE_S)
        while True:
            try:
                return ask()
            except ServiceUnavailable:
                if deadline.has_passed:
                    raise
            with deadline.suspended():
                self.monitor.await_serving()
            time.sleep(POLL_S)


def _require_server(url: str, info: BridgeInfo, kind: WeightKind) -> None:
    """As far as it says. Raises `PolicyMismatch` where it cannot serve what is trained; lists every
    reason."""
    problems = []
    if kind is WeightKind.ADAPTER and not info.lora_enabled:
        problems.append(
            "it takes no adapters: start vllm-api-server with --enable-lora --max-lora-rank R"
        )
    if kind is WeightKind.CHECKPOINT and info.lora_enabled:
        problems.append("it takes adapters, not checkpoints: start it without --enable-lora")
    if info.weights_socket is not None:
        problems.append("it shares its weights: start it without --share-weights")
    if problems:
        raise PolicyMismatch(
            f"the server at {url} is not one of this mode:\n  " + "\n  ".join(problems)
        )


def _dtype_to_load(wanted: str, info: BridgeInfo) -> torch.dtype:
    """Args: wanted: --dtype.

    Raises:
        PolicyMismatch: the server holds another one, or does not say which.
    """
    if info.dtype is None:
        raise PolicyMismatch(
            "the server does not say its data type at /bridge/info; it is too old for this mode"
        )
    if wanted not in ("auto", info.dtype):
        raise PolicyMismatch(
            f"--dtype {wanted}, but the server holds {info.dtype}; start both with the same, or "
            "the trainer with --dtype auto"
        )
    dtype: torch.dtype = getattr(torch, info.dtype)
    return dtype
