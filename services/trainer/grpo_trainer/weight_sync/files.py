"""Publishes weights as files in modes `lora_only`, `lora_restart` and `none`, every N steps.

The trainer announces each version in Redis, and all inference servers of the run follow. The modes
differ in what they train (`TrainedWeights`) and in whether the engine restarts on new weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import structlog
import torch

from grpo_core.clients.inference import BridgeClient, BridgeInfo, Completion
from grpo_core.weights.ref import UNTRAINED, WeightKind
from grpo_core.weights.versions import Announcement, VersionKind
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.checks.served_weights import (
    Alignment,
    Bound,
    ProbeLengths,
    PublicationCheck,
    Server,
)
from grpo_trainer.errors import PolicyMismatch
from grpo_trainer.model.loading import TrainedWeights, device_to_load_on, import_architecture
from grpo_trainer.model.policy import CausalLM
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.weight_sync.base import Published, Reach
from grpo_trainer.weight_sync.directories import VersionDirectories
from grpo_trainer.weight_sync.probe import ServerLeft, ServerProbe
from grpo_trainer.weight_sync.servers import Publisher, ServedPublication, ServerWatch
from grpo_trainer.weight_sync.source import WeightSource

log = structlog.get_logger()

T = TypeVar("T")

_ROUNDS = 3


@dataclass
class _Rounds:
    """Of a check: as long as no server answers, each is asked again, four times as patiently.
    `silent`: did not answer in this round."""

    number: int = 1
    silent: dict[str, ServerLeft] = field(default_factory=dict)

    def left(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name not in self.silent]

    def again(self, names: Iterable[str]) -> list[str]:
        """Those that are left; if there are none, the next round begins with all. Raises the error
        of a server after the last round."""
        every = [*names]
        if left := self.left(every):
            return left
        if self.number == _ROUNDS:
            raise self.silent[every[0]].cause from None
        self.number += 1
        self.silent.clear()
        return every


@dataclass(eq=False, kw_only=True)
class DirectorySync(Server):
    """Writes weights into directories, which a server loads: after every `every_steps` steps and
    after `last_step`.

    Args:
        weights: what is trained
        directories: where the weights are written
        dtype: the data type that the server must have; "auto" accepts any
        device: the device to train on; "auto" takes a GPU if there is one

    `version`: of the policy's weights.
    """

    weights: TrainedWeights
    directories: VersionDirectories
    dtype: str
    device: str
    every_steps: int
    last_step: int
    begun_as: PolicyVersion | None = field(init=False, default=None)
    epochs: Container[int] | None = field(init=False, default=None)
    server_run_id: str | None = field(init=False, default=None)
    version: PolicyVersion = field(init=False, default=PolicyVersion(0, 0))
    _policy: CausalLM = field(init=False)
    _lengths: ProbeLengths = field(init=False)
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
        published = self.publish_now(f"After step {step}")
        return replace(published, seconds=time.monotonic() - started)

    def publish_now(self, label: str) -> Published:
        """Write the policy's weights into a directory, let the server load them, and check it.

        Args:
            label: names the moment in error messages

        Raises:
            CheckpointNotSaved: the directory could not be written.
            ServedWeightsDiffer: the server reports the new weights but does not serve them.
            GrpoError: those of `_serve`, and of the requests of the check.
        """
        files = self.directories.write(self.version, self.weights, self._policy)
        return self._serve_and_check(files, label)

    def _serve_and_check(self, announced: Announcement, label: str) -> Published:
        """Let the server serve a version, and check it."""
        started = time.monotonic()
        if self.caches_stay:
            self._check.prime()
        reach = self._serve(announced)
        alignment = self._require_served(label)
        self._remove_older()
        seconds = time.monotonic() - started
        log.info(
            "weights.published",
            policy_version=tuple(announced.version),
            kind=announced.kind.value,
            seconds=round(seconds, 2),
            servers=None if reach is None else reach.servers,
            logprob_difference=alignment.mean,
        )
        return Published(announced.version, seconds, alignment=alignment, reach=reach)

    def _take_policy(
        self, dtype: torch.dtype, device: torch.device, probe: ProbeLengths
    ) -> CausalLM:
        """Load the untrained policy."""
        self._policy, self._lengths = self.weights.load(dtype, device).eval(), probe
        return self._policy

    def _begin(
        self, optimizer: MasterOptimizer, step: int, bound: Bound | None, known: Iterable[int]
    ) -> None:
        """Write the master weights into the policy, under an epoch beyond the known ones. The
        untrained policy's logprobs are those of the first check."""
        self._check = PublicationCheck(self._policy, self, self._lengths, bound)
        optimizer.write_into_parameters()
        self.directories.prepare()
        self.version = PolicyVersion(1 + max(self.directories.newest_epoch(), *known), step)

    def _serve(self, announced: Announcement) -> Reach | None:
        """Let the server serve the version. Returns None if it has no use for announcements."""
        raise NotImplementedError

    def _require_served(self, label: str) -> Alignment:
        return self._check.require(self.version, label)

    def _remove_older(self) -> None:
        self.directories.remove_older(())


@dataclass(eq=False, kw_only=True)
class FileSync(DirectorySync):
    """Args:
    bridge: client of the server at --inference-url
    connect: makes the client of another server, from its URL
    watch: sees the servers of the run
    publisher: brings a version to them
    source: serves the directories to them
    restarts: whether an engine restarts on new weights
    nodes: servers to wait for at the start; 0: the one at --inference-url
    """

    bridge: BridgeClient
    connect: Callable[[str], BridgeClient]
    watch: ServerWatch
    publisher: Publisher
    source: WeightSource
    restarts: bool
    nodes: int = 0
    _own_name: str | None = field(init=False, default=None)
    _clients: dict[str, BridgeClient] = field(init=False, default_factory=dict)
    _sources: list[str] = field(init=False, default_factory=list)
    _turn: str = field(init=False, default="")
    _publication: ServedPublication = field(init=False)
    _announced: Announcement = field(init=False)

    @property
    def caches_stay(self) -> bool:
        return not self.restarts

    def __post_init__(self) -> None:
        self.watch.on_lack = self._give_files

    def load_policy(self, restoring: bool = False) -> CausalLM:  # noqa: ARG002
        """Load the model of --model, in the LoRA modes with an adapter that changes nothing
        yet.

        Raises:
            ServiceUnavailable, LostServer, NoInferenceServer: the servers do not answer.
            PolicyMismatch: a server has another mode, data type or run.
            NoSuchDevice: the GPU to train on does not exist.
        """
        device = device_to_load_on(self.device)
        import_architecture(self.weights.model_name)
        # Before servers are waited for: those without the trainer's disk fetch the newest version
        # here before they serve.
        self._sources = self.source.open()
        self._replace_lost_version()
        info = self._agreed_info()
        dtype = _dtype_to_load(self.dtype, info)
        lengths = ProbeLengths.fitting(info.kv_block_size, info.max_model_len)
        return self._take_policy(dtype, device, lengths)

    def start(
        self,
        optimizer: MasterOptimizer,
        step: int,
        last_epoch: int = 0,
        bound: Bound | None = None,
    ) -> PolicyVersion:
        """Announce the policy's weights under an epoch later than every known one. Servers that
        have these weights already only rename them."""
        served = self.watch.await_serving()
        head = self.watch.versions.head()
        is_untrained = step == 0 and optimizer.unwritten_parameters() == 0
        epochs = [one.epoch for one in (*served.values(), *([head] if head else []))]
        self._begin(optimizer, step, bound, (last_epoch, *epochs))
        if is_untrained:
            announced = Announcement(**self.version.fields(), kind=VersionKind.BASE)
        else:
            announced = self.directories.write(self.version, self.weights, self._policy)
        self.begun_as = _name_before(announced, head)
        self._serve_and_check(announced, f"After step {step}")
        if self.begun_as is not None:
            log.info("weights.already_served", policy_version=tuple(self.begun_as))
        return self.version

    def _replace_lost_version(self) -> None:
        """A version of a process group has no files: if no server serves it, none can. Servers that
        wait for it serve the model of --model until `start` announces the restored weights."""
        head = self.watch.versions.head() if self.watch.versions.run_id else None
        if head is None or head.kind is VersionKind.BASE or self.directories.has(head.version):
            return
        if any(server.serves for server in self.watch.servers().values()):
            return
        log.warning(
            "weights.lost",
            policy_version=tuple(head.version),
            reason="it has no files here, and no server serves it",
            effect="until the first publication, servers that start serve --model",
        )
        untrained = PolicyVersion(head.version.epoch + 1, 0)
        self.watch.announce(Announcement(**untrained.fields(), kind=VersionKind.BASE), [])

    def recover_server(self) -> None:
        """Wait for a server if none serves, and announce again what Redis has lost.

        Raises:
            LostServer: no server came back in time.
            TrainerReplaced: another trainer publishes to this run.
        """
        self.watch.look()

    def served_logprobs(self, token_ids: list[int]) -> list[float]:
        """Of one of the servers. Raises the errors of `CheckedServer.served_logprobs`."""
        return self._at_one(lambda probe: probe.served_logprobs(token_ids))

    def sample(self, prompt_token_ids: list[int], max_tokens: int) -> Completion:
        """At one of the servers. Raises the errors of `served_logprobs`."""
        return self._at_one(lambda probe: probe.sample(prompt_token_ids, max_tokens))

    def close(self) -> None:
        log.info(
            "servers.summary",
            left=self.watch.left,
            late=self.publisher.late,
            unanswered_checks=self.watch.unanswered,
            repeated_announcements=self.watch.repeated,
            by_files=self.watch.by_files,
        )
        self.directories.close()
        self.source.close()
        self.watch.versions.close()
        for client in (self.bridge, *self._clients.values()):
            client.close()

    def _serve(self, announced: Announcement) -> Reach:
        """Announce the version to the servers. Raises the errors of `Publisher.publish`."""
        self._announced = self._completed(announced)
        self._publication = self._announce()
        return replace(self._publication.reach, incidents=self.watch.incidents())

    def _announce(self) -> ServedPublication:
        """Wait until servers serve the version. Announced again, it costs nothing."""
        has_files = self.directories.path_of(self._announced.version).is_dir()
        return self.publisher.publish(self._announced, self._sources if has_files else [])

    def _completed(self, announced: Announcement) -> Announcement:
        more = {"restarts": self.restarts, "model": self.weights.model_name}
        return announced.model_copy(update=more)

    def _give_files(self, servers: list[str]) -> None:
        """Servers find no source of the announced version, of which there are no files: write those
        of the policy, which may be newer, and announce it with them."""
        announced = self._announced
        is_base = announced.kind is VersionKind.BASE
        if not is_base and not self.directories.path_of(announced.version).is_dir():
            reason = f"{', '.join(servers)} asked for it"
            written = self.directories.write(self.version, self.weights, self._policy, reason)
            self._announced = self._completed(written)
            self.watch.announce(self._announced, self._sources)

    def _require_served(self, label: str) -> Alignment:
        """Check one of the servers, each in its turn, and those that joined since."""
        rounds, serving = _Rounds(), [*self._publication.serving]
        while True:
            turn = self._turn if self._turn in serving else self._next(serving)
            names = {turn, *self.watch.unchecked(serving)}
            servers = {self._label(name): self._probe(name, rounds) for name in sorted(names)}
            try:
                alignment = self._check.require(self.version, label, servers)
            except ServerLeft as gone:
                rounds.silent[gone.name] = gone
                serving = rounds.left(serving) or rounds.again(self._announce().serving)
                continue
            for name in names:
                self.watch.checked(name)
            self._turn = self._next(serving)
            return alignment

    def _remove_older(self) -> None:
        removed = self.directories.remove_older(self._publication.in_use)
        self.watch.versions.forget(removed)

    def _at_one(self, ask: Callable[[Server], T]) -> T:
        """The answer of the server whose turn it is, or of another one if it leaves or is late."""
        rounds = _Rounds()
        while True:
            serving = self.watch.await_serving()
            newest = max(one.version for one in serving.values())
            names = rounds.again(name for name, one in serving.items() if one.version == newest)
            if self._turn not in names:
                self._turn = self._next(names)
            try:
                return ask(self._probe(self._turn, rounds))
            except ServerLeft as gone:
                rounds.silent[gone.name] = gone

    def _next(self, names: Iterable[str]) -> str:
        """The name after the last one whose turn it was."""
        ordered = sorted(names)
        return next((name for name in ordered if name > self._turn), ordered[0])

    def _probe(self, name: str, rounds: _Rounds) -> ServerProbe:
        patience_s = self.publisher.wait_s * 4 ** (rounds.number - 1)
        return ServerProbe(name, self._client(name), self.watch, patience_s)

    def _client(self, name: str) -> BridgeClient:
        """--inference-url may be the only address under which its server is reachable from here."""
        servers = self.watch.known
        is_alone = not self.nodes and len(servers) == 1
        url = servers[name].url if name in servers else ""
        if not url or name == self._own_name or is_alone:
            return self.bridge
        if url not in self._clients:
            self._clients[url] = self.connect(url)
        return self._clients[url]

    def _label(self, name: str) -> str:
        servers = self.watch.known
        if len(servers) < 2 or name not in servers:
            return "the server"
        return f"server {name} at {servers[name].url}"

    def _agreed_info(self) -> BridgeInfo:
        """What the servers report. Raises `PolicyMismatch` if they do not fit."""
        versions, kind = self.watch.versions, self.weights.kind
        info = None
        if not (self.nodes and versions.run_id):
            info = self.bridge.info()
            _require_server(self.bridge.base_url, info, kind, versions.run_id)
            versions.run_id, self._own_name = info.run_id or "", info.name
        self.server_run_id = versions.run_id
        dtypes: dict[str, str] = {}
        for name in self.watch.await_all(self.nodes) if self.nodes else ():
            client = self._client(name)
            info = client.info()
            _require_server(client.base_url, info, kind, versions.run_id)
            _dtype_to_load(self.dtype, info)
            dtypes[name] = str(info.dtype)
        if len({*dtypes.values()}) > 1:
            told = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
            raise PolicyMismatch(f"different data types ({told}); start all with the same --dtype")
        assert info is not None, "there is at least one server"
        return info


def _name_before(announced: Announcement, head: Announcement | None) -> PolicyVersion | None:
    """The version under which these weights were announced before; None if they were not."""
    if head is None:
        return UNTRAINED if announced.kind is VersionKind.BASE else None
    is_same = (head.kind.weights, head.digest) == (announced.kind.weights, announced.digest)
    return head.version if is_same else None


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
            f"the server's --run-id is {info.run_id!r}, but the trainer's is {run_id!r}; "
            "omit --run-id"
        )
    if kind is WeightKind.ADAPTER and not info.lora_enabled:
        problems.append("it accepts no adapters: start it with --enable-lora --max-lora-rank R")
    if kind is WeightKind.CHECKPOINT and info.lora_enabled:
        problems.append("it accepts adapters, no whole models: start it without --enable-lora")
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
        raise PolicyMismatch("no data type at /bridge/info; upgrade vllm-api-server")
    if wanted not in ("auto", info.dtype):
        raise PolicyMismatch(
            f"--dtype {wanted}, but the server's weights are in {info.dtype}; start trainer and "
            "server with the same --dtype, or the trainer with --dtype auto"
        )
    dtype: torch.dtype = getattr(torch, info.dtype)
    return dtype
