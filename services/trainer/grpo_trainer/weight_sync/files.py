"""Publishes weights as files in modes `lora_only`, `lora_restart` and `none`, every N steps.

The modes differ in what they train (`TrainedWeights`) and in how the server loads it (`Action`).
After a crash the supervisor restores the weights that the server served last, so the trainer only
waits.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import torch

from grpo_core.clients.inference import BridgeClient, BridgeInfo
from grpo_core.deadline import Deadline
from grpo_core.tree.weights import SERVED_KEPT
from grpo_core.weights.directory_checks import directory_digest
from grpo_core.weights.ref import WeightKind, WeightRef
from grpo_core.weights.supervisor import SupervisorClient, SupervisorStatus
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.atomic_files import make_directory, remove_directory, remove_unfinished
from grpo_trainer.checks.served_weights import (
    Alignment,
    Bound,
    ProbeLengths,
    PublicationCheck,
    Server,
)
from grpo_trainer.errors import CheckpointNotSaved, PolicyMismatch
from grpo_trainer.model.loading import TrainedWeights, device_to_load_on, import_architecture
from grpo_trainer.model.policy import CausalLM
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.weight_sync.base import POLL_S, CheckedServer, Published
from grpo_trainer.weight_sync.supervisor import Publisher, ServerMonitor

log = structlog.get_logger()

SEEN_DEADLINE_S = 30.0
"""For a file of the trainer to be seen by the server: a network file system may show it late."""

_NAME = re.compile(r"epoch_(\d+)_step_(\d+)")


class WeightDirectories:
    """Args: root: the server's --weights-dir"""

    def __init__(self, root: Path) -> None:
        self.root = root

    def prepare(self) -> None:
        """Create the root, and remove unfinished directories of a trainer that was killed."""
        make_directory(self.root)
        remove_unfinished(self.root)

    def write(self, version: PolicyVersion, weights: TrainedWeights, policy: CausalLM) -> WeightRef:
        """Raises `CheckpointNotSaved` if the directory could not be written."""
        target = self.root / f"epoch_{version.epoch}_step_{version.step}"
        weights.write(policy, target)
        try:
            digest = directory_digest(target)
        except OSError as error:
            raise CheckpointNotSaved(
                f"{target} was written and cannot be read: {error}; check the disk"
            ) from error
        return WeightRef(version=version, kind=weights.kind, path=target, digest=digest)

    def remove_older(self, in_use: Collection[Path]) -> None:
        """Remove all but the newest two and those in use.

        Args:
            in_use: resolved paths that requests in flight still read
        """
        for _, path in sorted(self._versions())[:-SERVED_KEPT]:
            if path.resolve() not in in_use:
                remove_directory(path)

    def newest_epoch(self) -> int:
        """The newest epoch that has a directory, or 0."""
        return max((version.epoch for version, _ in self._versions()), default=0)

    def _versions(self) -> list[tuple[PolicyVersion, Path]]:
        if not self.root.is_dir():
            return []
        found = ((_NAME.fullmatch(path.name), path) for path in self.root.iterdir())
        return [(PolicyVersion(int(m[1]), int(m[2])), path) for m, path in found if m]


@dataclass(eq=False, kw_only=True)
class DirectorySync(Server):
    """Writes weights into directories, which a server loads: after every `every_steps` steps and
    after `last_step`.

    Args:
        weights: what is trained
        directories: where the weights are written; the server must see the same path
        dtype: the data type that the server must have; "auto" accepts any
        device: the device to train on; "auto" takes a GPU if there is one

    `version`: of the policy's weights.
    """

    weights: TrainedWeights
    directories: WeightDirectories
    dtype: str
    device: str
    every_steps: int
    last_step: int
    begun_as: PolicyVersion | None = field(init=False, default=None)
    server_run_id: str | None = field(init=False, default=None)
    version: PolicyVersion = field(init=False, default=PolicyVersion(0, 0))
    _policy: CausalLM = field(init=False)
    _check: PublicationCheck = field(init=False)

    @property
    def caches_stay(self) -> bool:
        """Whether the server's caches outlive a change of the weights."""
        return True

    def publish(self, optimizer: MasterOptimizer, step: int) -> Published:
        """As `WeightSync.publish`. Raises the errors of `publish_now`."""
        started = time.monotonic()
        optimizer.write_into_parameters()
        self.version = PolicyVersion(self.version.epoch, step)
        if step % self.every_steps and step != self.last_step:
            return Published(self.version, 0.0, is_served=False)
        alignment = self.publish_now(f"After step {step}")
        return Published(self.version, time.monotonic() - started, alignment=alignment)

    def publish_now(self, label: str) -> Alignment:
        """Write the policy's weights into a directory, let the server load them, and check it.

        Args:
            label: names the moment in error messages

        Raises:
            CheckpointNotSaved: the directory could not be written.
            ServedWeightsDiffer: the server reports the new weights but does not serve them.
            GrpoError: those of `_load`, and of the requests of the check.
        """
        started, version = time.monotonic(), self.version
        files = self.directories.write(version, self.weights, self._policy)
        if self.caches_stay:
            self._check.prime()
        in_use = self._load(files)
        alignment = self._check.require(version, label)
        self.directories.remove_older(in_use)
        log.info(
            "weights.published",
            policy_version=tuple(version),
            seconds=round(time.monotonic() - started, 2),
            logprob_difference=alignment.mean,
        )
        return alignment

    def _loaded(self, dtype: torch.dtype, device: torch.device, probe: ProbeLengths) -> CausalLM:
        """The untrained policy; its logprobs are those of the first check."""
        self._policy = self.weights.load(dtype, device).eval()
        self._check = PublicationCheck(self._policy, self, probe)
        return self._policy

    def _begin(
        self, optimizer: MasterOptimizer, step: int, bound: Bound | None, known: Iterable[int]
    ) -> None:
        """Write the master weights into the policy, under an epoch beyond the known ones."""
        if bound is not None:
            self._check.bound = bound
        optimizer.write_into_parameters()
        self.directories.prepare()
        self.version = PolicyVersion(1 + max(self.directories.newest_epoch(), *known), step)

    def _load(self, files: WeightRef) -> frozenset[Path]:
        """Let the server load a directory; returns those that requests in flight still read."""
        raise NotImplementedError


@dataclass(eq=False, kw_only=True)
class FileSync(CheckedServer, DirectorySync):
    """Args:
    bridge: client of the inference server
    supervisor: client of that server's supervisor
    monitor: watches that supervisor's status
    publisher: makes the server load a directory
    """

    bridge: BridgeClient
    supervisor: SupervisorClient
    monitor: ServerMonitor
    publisher: Publisher
    _crashes: int = field(init=False, default=0)

    @property
    def caches_stay(self) -> bool:
        return not self.publisher.action.restarts

    def load_policy(self, restoring: bool = False) -> CausalLM:  # noqa: ARG002
        """Load the model of --model, in the LoRA modes with an adapter that changes nothing
        yet.

        Raises:
            ServiceUnavailable, LostServer: the server or its supervisor does not answer.
            PolicyMismatch: the server has another mode, data type, run or weights directory.
            NoSuchDevice: the GPU to train on does not exist.
        """
        device = device_to_load_on(self.device)
        import_architecture(self.weights.model_name)
        info = self.bridge.info()
        _require_server(self.bridge.base_url, info, self.weights.kind, self.supervisor.run_id)
        self.server_run_id = self.supervisor.run_id = info.run_id or ""
        dtype = _dtype_to_load(self.dtype, info)
        self._agreed_status(info)
        self._agreed_directory(info)
        lengths = ProbeLengths.fitting(info.kv_block_size, info.max_model_len)
        return self._loaded(dtype, device, lengths)

    def start(
        self,
        optimizer: MasterOptimizer,
        step: int,
        last_epoch: int = 0,
        bound: Bound | None = None,
    ) -> PolicyVersion:
        """Start an epoch later than every known one, and publish unless the server already serves
        exactly these weights."""
        status = self.monitor.await_serving()
        is_untrained = optimizer.unwritten_parameters() == 0
        known = last_epoch, status.epoch, self.supervisor.newest_epoch()
        self._begin(optimizer, step, bound, known)
        # Without a restart a publication is cheap, so it is done even if the server has these
        # weights.
        if self.caches_stay or not self._has(status, is_untrained):
            self.publish_now(f"After step {step}")
        else:
            self.begun_as = status.version
            self._check.require(status.version, "At the start")
            log.info("weights.already_served", policy_version=tuple(status.version))
        return self.version

    def recover_server(self) -> None:
        """Wait for the server's return if it is down. Raises `LostServer`."""
        self.monitor.look()

    def crashes(self) -> int:
        status = self.monitor.status()
        if status is not None:
            self._crashes = status.crashes
        return self._crashes

    def await_serving(self) -> None:
        self.monitor.await_serving()

    def close(self) -> None:
        self.supervisor.close()
        self.bridge.close()

    def _load(self, files: WeightRef) -> frozenset[Path]:
        """Raises `WeightsRefused`, `NotPublished`, `LostServer`: the server serves the previous
        weights, or none."""
        return self.publisher.publish(files)

    def _has(self, status: SupervisorStatus, is_untrained: bool) -> bool:
        """Whether the server serves the policy's weights, under any policy version."""
        served = status.weights
        if not served.trained:
            return is_untrained
        return (
            served.kind is self.weights.kind
            and served.path is not None
            and self.weights.are_in(self._policy, served.path)
        )

    def _agreed_status(self, info: BridgeInfo) -> SupervisorStatus:
        """The supervisor's status, once Redis and the server at our URL report the same version."""
        deadline = Deadline(self.supervisor.deadline_s)
        while True:
            status = self.monitor.await_serving()
            if status.version == info.policy_version:
                return status
            if deadline.has_passed:
                raise PolicyMismatch(
                    f"the server at {self.bridge.base_url} serves policy version "
                    f"{tuple(info.policy_version)}, but according to Redis the server of run "
                    f"{self.supervisor.run_id!r} serves {tuple(status.version)}. So "
                    "--inference-url is not the URL of that run's server. Start server and trainer "
                    "with the same --redis-url and --run-id"
                )
            time.sleep(POLL_S)
            info = self.bridge.info()

    def _agreed_directory(self, info: BridgeInfo) -> None:
        """Choose a directory for the weights in which the server looks too: that below --save-path
        if the server loads weights from there, otherwise the server's own.

        Raises:
            PolicyMismatch: the trainer cannot write into it, or it is another directory on the
                server's host.
        """
        assert info.weights_dir is not None, "_require_server checks this"
        accepted = Path(info.weights_dir)
        if not self.directories.root.is_relative_to(accepted):
            self.directories = WeightDirectories(accepted)
        probe = accepted / f"probe-{secrets.token_hex(8)}"
        try:
            make_directory(accepted)
            probe.touch()
        except OSError as error:
            raise PolicyMismatch(
                f"the server loads weights from {accepted}, and the trainer cannot write there: "
                f"{error}. Start the server with a --weights-dir that the trainer can write to"
            ) from error
        try:
            deadline = Deadline(SEEN_DEADLINE_S)
            while not self.bridge.sees(probe.name):
                if deadline.has_passed:
                    raise PolicyMismatch(
                        f"the server at {self.bridge.base_url} loads weights from {accepted}, but "
                        "does not see a file that the trainer wrote there; let both hosts or "
                        "containers mount the same directory under this path"
                    )
                time.sleep(POLL_S)
        finally:
            probe.unlink()


def _require_server(url: str, info: BridgeInfo, kind: WeightKind, run_id: str) -> None:
    """Raises `PolicyMismatch` if the server reports that it cannot serve what is trained; lists
    every reason.

    Args:
        run_id: the value of --run-id; empty if it was not given
    """
    problems = []
    if info.run_id is None:
        problems.append("the server runs without Redis: start it without --redis-url none")
    elif run_id not in ("", info.run_id):
        problems.append(
            f"the server's --run-id is {info.run_id!r}, but the trainer's is {run_id!r}: omit the "
            "trainer's --run-id"
        )
    if kind is WeightKind.ADAPTER and not info.lora_enabled:
        problems.append(
            "the server accepts no adapters: start vllm-api-server with --enable-lora "
            "--max-lora-rank R"
        )
    if kind is WeightKind.CHECKPOINT and info.lora_enabled:
        problems.append(
            "the server accepts adapters, not whole models: start the server without --enable-lora"
        )
    if info.weights_socket is not None:
        problems.append("the server shares its weights: start the server without --share-weights")
    if problems:
        raise PolicyMismatch(
            f"the server at {url} does not fit the trainer's mode:\n  " + "\n  ".join(problems)
        )


def _dtype_to_load(wanted: str, info: BridgeInfo) -> torch.dtype:
    """The data type to load the model in.

    Args:
        wanted: the value of --dtype

    Raises:
        PolicyMismatch: the server has another data type, or does not report one.
    """
    if info.dtype is None:
        raise PolicyMismatch(
            "the server reports no data type at /bridge/info; upgrade vllm-api-server"
        )
    if wanted not in ("auto", info.dtype):
        raise PolicyMismatch(
            f"--dtype {wanted}, but the server's weights are in {info.dtype}; start trainer and "
            "server with the same --dtype, or the trainer with --dtype auto"
        )
    dtype: torch.dtype = getattr(torch, info.dtype)
    return dtype
