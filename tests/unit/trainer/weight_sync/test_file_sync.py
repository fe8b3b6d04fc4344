"""Publication by files, with a stand-in server and a real Redis.

The tests check when weights are published, under which version, and which files are kept.
"""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from grpo_core.clients.inference import BridgeInfo, Completion
from grpo_core.errors import ServiceUnavailable
from grpo_core.weights.directory_checks import check_weights
from grpo_core.weights.ref import WeightKind
from grpo_core.weights.supervisor import Action, OutcomeState, SupervisorClient, SupervisorCommand
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.errors import EngineCrashed, PolicyMismatch
from grpo_trainer.model.adapter import trained_parameters
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.weight_sync import base
from grpo_trainer.weight_sync import files as file_sync
from grpo_trainer.weight_sync.files import FileSync, WeightDirectories
from grpo_trainer.weight_sync.supervisor import Publisher, ServerMonitor
from tests.support.directories import names
from tests.unit.trainer.served_model import ServedModel
from tests.unit.trainer.supervisor_stand_in import StandIn
from tests.unit.trainer.tiny_policy import LORA, gather_gradient, optimizer_of

LOAD = Action.LOAD_ADAPTER
ACTIONS = {"lora_only": LOAD, "none": Action.RESTART_WITH_CHECKPOINT}

IGNORED = "ignored"
"""The id of a command that the server never answers."""


class StandInServer:
    """Supervisor and engine: loads weights like the real ones, and computes with them."""

    base_url = "http://server"

    def __init__(self, url: str, model: str, root: Path, takes_adapters: bool) -> None:
        self._model, self._root, self._takes_adapters = model, root, takes_adapters
        self.mounted = root
        self._engine = ServedModel(_loaded(model))
        self.supervisor = StandIn(url, uuid.uuid4().hex[:8], itertools.repeat(self._take))
        self.version = PolicyVersion(0, 0)
        self.faults: Iterator[Callable[[], None]] = iter(())
        """What happens to the next requests, before they are answered."""

    def _next_fault(self) -> None:
        if (fault := next(self.faults, None)) is not None:
            fault()

    def crash(self) -> None:
        """The engine ends and another one starts."""
        self.supervisor.becomes(crashes=self.supervisor.says.crashes + 1)

    def fail(self) -> None:
        raise ServiceUnavailable("no answer")

    def crash_and_fail(self) -> None:
        self.crash()
        self.fail()

    def _take(self, supervisor: StandIn, command: SupervisorCommand) -> None:
        if command.id == IGNORED:
            return
        kind = command.action.kind
        directory = check_weights(command.weights, self._root)
        adapted = kind is WeightKind.ADAPTER
        model = _loaded(self._model, directory) if adapted else _loaded(directory)
        self._engine.swap(model, command.version)
        self.version = command.version
        supervisor.serve(command)
        supervisor.says = supervisor.says.model_copy(update={"kind": kind})
        supervisor.answer(command, OutcomeState.DONE, in_use=json.dumps([]))

    def info(self) -> BridgeInfo:
        return BridgeInfo(
            policy_version=self.version,
            paused=False,
            weights_intact=True,
            weights_socket=None,
            dtype="float32",
            max_model_len=256,
            kv_block_size=16,
            lora_enabled=self._takes_adapters,
            run_id=self.supervisor.run_id,
            weights_dir=str(self._root),
        )

    def sees(self, probe: str) -> bool:
        return (self.mounted / probe).exists()

    def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        self._next_fault()
        return self._engine.served_logprobs(token_ids)

    def sample(self, prompt_token_ids: list[int], max_tokens: int, **_: Any) -> Completion:
        self._next_fault()
        return self._engine.sample(prompt_token_ids, max_tokens)

    def close(self) -> None:
        """Nothing to close."""


def _loaded(model: Path | str, adapter: Path | None = None) -> Any:
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return (whole if adapter is None else PeftModel.from_pretrained(whole, str(adapter))).eval()


@dataclass
class Bench:
    """One server, and a sequence of trainers."""

    url: str
    mode: str
    model: str
    root: Path
    server: StandInServer

    @contextmanager
    def trainer(self, every_steps: int = 1, last_step: int = 100) -> Iterator[FileSync]:
        link = SupervisorClient(self.url, self.server.supervisor.run_id, deadline_s=60.0)
        monitor = ServerMonitor(link, return_deadline_s=60.0)
        action = ACTIONS[self.mode]
        adapter = action.kind is WeightKind.ADAPTER
        sync = FileSync(
            bridge=self.server,  # type: ignore[arg-type]
            supervisor=link,
            monitor=monitor,
            publisher=Publisher(link, monitor, action, deadline_s=60.0),
            weights=TrainedWeights(self.model, LORA if adapter else None),
            directories=WeightDirectories(self.root),
            dtype="auto",
            device="cpu",
            every_steps=every_steps,
            last_step=last_step,
        )
        torch.manual_seed(0)
        yield sync
        sync.close()

    @property
    def asked_for(self) -> list[PolicyVersion]:
        return [command.version for command in self.server.supervisor.seen]


@pytest.fixture
def bench(redis_url: str, model: str, tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    with ExitStack() as servers:

        def made(mode: str, takes_adapters: bool | None = None) -> Bench:
            takes = mode == "lora_only" if takes_adapters is None else takes_adapters
            server = StandInServer(redis_url, model, tmp_path / "served", takes)
            servers.enter_context(server.supervisor)
            return Bench(redis_url, mode, model, tmp_path / "served", server)

        yield made


def begun(sync: FileSync, step: int = 0, state: Any = None) -> MasterOptimizer:
    """A trainer that starts at `step`, from a checkpoint's tensors if there are any."""
    policy = sync.load_policy(restoring=state is not None)
    optimizer = optimizer_of(policy)
    if state is not None:
        optimizer.load_tensors(list(trained_parameters(policy)), state)
    sync.start(optimizer, step, last_epoch=0 if state is None else 1)
    return optimizer


def saved(sync: FileSync, optimizer: MasterOptimizer) -> dict[str, torch.Tensor]:
    tensors = optimizer.tensors(list(trained_parameters(sync._policy)))
    return {name: tensor.clone() for name, tensor in tensors.items()}


def take_steps(sync: FileSync, optimizer: MasterOptimizer, steps: range) -> list[bool]:
    """Take steps; returns whether each result was published."""
    published = []
    for step in steps:
        gather_gradient(sync._policy, seed=step)
        optimizer.step(step)
        done = sync.publish(optimizer, step + 1)
        assert done.version.step == step + 1
        assert (done.alignment is not None) == done.is_served == (done.seconds > 0)
        published.append(done.is_served)
    return published


NewBench = Callable[..., Bench]


def test_adapters_are_published_at_the_start_and_at_every_step(bench: NewBench) -> None:
    rig = bench("lora_only")
    with rig.trainer() as sync:
        optimizer = begun(sync)
        assert take_steps(sync, optimizer, range(3)) == [True] * 3
        assert sync.begun_as is None
    assert rig.asked_for == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert names(rig.root) == ["epoch_1_step_2", "epoch_1_step_3"]


def test_weights_are_written_where_the_server_looks_and_the_run_is_the_servers(
    bench: NewBench, tmp_path: Path
) -> None:
    rig = bench("lora_only")
    own = replace(rig, root=tmp_path / "save_path" / "served_weights")
    with own.trainer() as sync:
        sync.supervisor.run_id = ""
        begun(sync)
        assert sync.server_run_id == rig.server.supervisor.run_id
    assert names(rig.root) == ["epoch_1_step_0"]
    assert not own.root.exists()


def test_a_server_that_looks_elsewhere_is_refused_at_the_start(
    bench: NewBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_sync, "SEEN_DEADLINE_S", 0.0)
    rig = bench("lora_only")
    rig.server.mounted = tmp_path
    with rig.trainer() as sync, pytest.raises(PolicyMismatch, match="does not see a file"):
        sync.load_policy()
    assert names(rig.root) == []
    (rig.root).rmdir()
    rig.root.write_text("a file")
    with rig.trainer() as sync, pytest.raises(PolicyMismatch, match="cannot write there"):
        sync.load_policy()


def test_a_restart_is_saved_if_the_server_has_the_weights(bench: NewBench) -> None:
    rig = bench("none")
    with rig.trainer(every_steps=2, last_step=5) as sync:
        optimizer = begun(sync)
        assert sync.begun_as == (0, 0)
        assert take_steps(sync, optimizer, range(4)) == [False, True, False, True]
        state = saved(sync, optimizer)
        assert take_steps(sync, optimizer, range(4, 5)) == [True]
    assert rig.asked_for == [(1, 2), (1, 4), (1, 5)]

    with rig.trainer(every_steps=2) as sync:  # starts from step 4, while 5 is served
        optimizer = begun(sync, 4, state)
        assert sync.begun_as is None
        take_steps(sync, optimizer, range(4, 6))
        state = saved(sync, optimizer)
    assert rig.asked_for[3:] == [(2, 4), (2, 6)]

    with rig.trainer(every_steps=2) as sync:  # starts from step 6, which is served as (2, 6)
        begun(sync, 6, state)
        assert sync.begun_as == (2, 6)
    assert rig.asked_for[5:] == []


@pytest.mark.parametrize("known_from", ["a directory", "a saved state", "a command"])
def test_a_run_opens_an_epoch_beyond_every_known_one(known_from: str, bench: NewBench) -> None:
    """A killed trainer may have written or commanded weights that are not served yet."""
    rig = bench("none")
    with rig.trainer() as sync:
        if known_from == "a directory":
            (rig.root / "epoch_8_step_2").mkdir(parents=True)
        elif known_from == "a command":
            unread = {"path": "/x", "sha256": "0" * 64}
            sync.supervisor.send(
                SupervisorCommand(id=IGNORED, action=LOAD, epoch=8, step=0, **unread)
            )
        last_epoch = 8 if known_from == "a saved state" else 1
        optimizer = optimizer_of(sync.load_policy())
        assert sync.start(optimizer, step=0, last_epoch=last_epoch) == (9, 0)


@pytest.mark.parametrize(
    ("mode", "takes_adapters", "version", "told"),
    [
        ("lora_only", False, (0, 0), "the server accepts no adapters: start vllm-api-server with"),
        ("none", False, (3, 1), r"\(3, 1\).*\(0, 0\). So --inference-url is not"),
    ],
)
def test_a_server_of_another_mode_or_run_is_refused(
    mode: str, takes_adapters: bool, version: tuple[int, int], told: str, bench: NewBench
) -> None:
    rig = bench(mode, takes_adapters)
    rig.server.version = PolicyVersion(*version)
    with rig.trainer() as sync:
        sync.supervisor.deadline_s = 0.0  # time for Redis and the server to report the same version
        with pytest.raises(PolicyMismatch, match=told):
            sync.load_policy()


CRASHED = "engine.crashed_during_check"
FIRST_REQUEST = {
    "none": "the logprobs of 32 tokens",
    "lora_only": "1 sampled tokens after a prompt",
}
"""Of a publication. With an adapter, the cache is filled before it is published."""


@pytest.mark.parametrize("mode", FIRST_REQUEST)
def test_a_request_that_crashes_the_engine_twice_ends_the_run(mode: str, bench: NewBench) -> None:
    rig = bench(mode)
    with rig.trainer() as sync:
        optimizer = begun(sync)
        rig.server.faults = itertools.repeat(rig.server.crash_and_fail)
        told = rf"crashed 2 times while the trainer waited for {FIRST_REQUEST[mode]}.*vllm-server"
        with pytest.raises(EngineCrashed, match=told):
            take_steps(sync, optimizer, range(1))
        assert rig.server.supervisor.says.crashes == 2


@pytest.mark.parametrize("fault", ["crash_and_fail", "crash"])
def test_an_engine_that_is_killed_once_during_a_request_is_logged(
    fault: str, bench: NewBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client repeats a lost request by itself, so that the crash may not be seen as a failure.
    A request that waits for a slow start still gets its second chance."""
    monkeypatch.setattr(base, "PROBE_DEADLINE_S", 0.0)
    rig = bench("none")
    with rig.trainer() as sync:
        optimizer = begun(sync)
        rig.server.crash()  # of an earlier engine: it does not count
        rig.server.faults = iter([getattr(rig.server, fault)])
        with capture_logs() as logs:
            assert take_steps(sync, optimizer, range(1)) == [True]
    crashes = [event["request"] for event in logs if event["event"] == CRASHED]
    assert crashes == ["the logprobs of 32 tokens"]


def test_a_server_that_serves_without_an_answer_is_unavailable(
    bench: NewBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "PROBE_DEADLINE_S", 0.0)
    rig = bench("none")
    with rig.trainer() as sync:
        optimizer = begun(sync)
        rig.server.faults = itertools.repeat(rig.server.fail)
        with pytest.raises(ServiceUnavailable, match="no answer"):
            take_steps(sync, optimizer, range(1))
