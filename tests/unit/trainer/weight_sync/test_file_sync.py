"""Publication by files, with a stand-in server and a real Redis.

The tests check when weights are published, under which version, and which files are kept.
"""

from __future__ import annotations

import itertools
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import PeftModel
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from grpo_core.clients.inference import BridgeInfo, Completion
from grpo_core.errors import ServiceUnavailable
from grpo_core.weights.ref import UNTRAINED
from grpo_core.weights.servers import ServerState
from grpo_core.weights.version_log import VersionLog, sources_key
from grpo_core.weights.versions import Announcement, VersionKind, version_id
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.checks import served_weights
from grpo_trainer.errors import EngineCrashed, PolicyMismatch, ServedWeightsDiffer
from grpo_trainer.model.adapter import trained_parameters
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.weight_sync import probe, servers
from grpo_trainer.weight_sync.base import Incidents
from grpo_trainer.weight_sync.collective import CollectiveDirectories
from grpo_trainer.weight_sync.directories import VersionDirectories
from grpo_trainer.weight_sync.files import FileSync
from grpo_trainer.weight_sync.servers import Publisher, ServedPublication, ServerWatch
from grpo_trainer.weight_sync.source import WeightSource
from tests.support.directories import names
from tests.support.wait import DEADLINE_S, wait_for
from tests.unit.trainer.served_model import ServedModel
from tests.unit.trainer.server_stand_in import StandIn
from tests.unit.trainer.tiny_policy import LORA, gather_gradient, optimizer_of

FIRST = "a"
LOADING = threading.Lock()
"""transformers changes global state while it loads a model."""
FULL, ADAPTER, BASE = VersionKind.FULL, VersionKind.ADAPTER, VersionKind.BASE


class StandInServer:
    """Supervisor and engine: loads weights like the real ones, and computes with them."""

    def __init__(self, url: str, run_id: str, name: str, model: str, root: Path) -> None:
        self.base_url = f"http://{name}"
        self.name = name
        self._model, self._root = model, root
        self.takes_adapters = False
        self.dtype = "float32"
        self.engine = ServedModel(_loaded(model))
        self.shown = StandIn(url, run_id, name, self._take)
        self.is_stuck = False
        """Whether it reports new versions, and serves the old one."""
        self.digest = ""
        self.loads: list[PolicyVersion] = []
        self.probed: list[PolicyVersion] = []
        self.faults: Iterator[Callable[[], None]] = iter(())
        """What happens to the next requests, before they are answered."""

    def _next_fault(self) -> None:
        if (fault := next(self.faults, None)) is not None:
            fault()

    def crash(self) -> None:
        """The engine ends and another one starts."""
        self.shown.becomes(crashes=self.shown.says.crashes + 1)

    def fail(self) -> None:
        raise ServiceUnavailable("no answer")

    def crash_and_fail(self) -> None:
        self.crash()
        self.fail()

    def _take(self, shown: StandIn, announced: Announcement) -> None:
        if announced.digest != self.digest:
            self.digest = announced.digest
            self.loads.append(announced.version)
            directory = self._root / announced.id
            if announced.kind is BASE:
                model = _loaded(self._model)
            elif announced.kind is ADAPTER:
                model = _loaded(self._model, directory)
            else:
                model = _loaded(directory)
            if not self.is_stuck:
                self.engine.swap(model, announced.version)
        self.engine.version = announced.version
        shown.adopt(announced)

    def info(self) -> BridgeInfo:
        return BridgeInfo(
            policy_version=self.engine.version,
            paused=False,
            weights_intact=True,
            weights_socket=None,
            dtype=self.dtype,
            max_model_len=256,
            kv_block_size=16,
            lora_enabled=self.takes_adapters,
            run_id=self.shown.run_id,
            name=self.name,
        )

    def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        self._next_fault()
        self.probed.append(self.engine.version)
        return self.engine.served_logprobs(token_ids)

    def sample(self, prompt_token_ids: list[int], max_tokens: int, **_: Any) -> Completion:
        self._next_fault()
        return self.engine.sample(prompt_token_ids, max_tokens)

    def close(self) -> None:
        """Nothing to close."""


def _loaded(model: Path | str, adapter: Path | None = None) -> Any:
    with LOADING:
        whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        return (whole if adapter is None else PeftModel.from_pretrained(whole, str(adapter))).eval()


@dataclass
class Bench:
    """Servers, and a sequence of trainers."""

    url: str
    mode: str
    model: str
    root: Path
    stack: ExitStack
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    servers: dict[str, StandInServer] = field(default_factory=dict)

    def add(self, name: str) -> StandInServer:
        server = StandInServer(self.url, self.run_id, name, self.model, self.root)
        server.takes_adapters = self.mode == "lora_only"
        self.servers[server.base_url] = server
        self.stack.enter_context(server.shown)
        return server

    @property
    def server(self) -> StandInServer:
        return next(iter(self.servers.values()))

    @contextmanager
    def trainer(
        self,
        every_steps: int = 1,
        last_step: int = 100,
        nodes: int = 0,
        dtype: str = "auto",
        collective: bool = False,
    ) -> Iterator[FileSync]:
        """Args: collective: through a process group, which no server can join"""
        watch = ServerWatch(VersionLog(self.url, self.run_id, DEADLINE_S), return_deadline_s=60.0)
        adapter = self.mode == "lora_only"
        directories = VersionDirectories(self.root, with_deltas=not adapter)
        if collective:
            directories = CollectiveDirectories(self.root, watch, "localhost", DEADLINE_S)
        sync = FileSync(
            bridge=self.server,  # type: ignore[arg-type]
            connect=self.servers.__getitem__,  # type: ignore[arg-type]
            watch=watch,
            publisher=Publisher(watch, wait_s=60.0, deadline_s=60.0),
            source=WeightSource(self.root, None, 0, None),
            restarts=self.mode == "restart",
            nodes=nodes,
            weights=TrainedWeights(self.model, LORA if adapter else None),
            directories=directories,
            dtype=dtype,
            device="cpu",
            every_steps=every_steps,
            last_step=last_step,
        )
        torch.manual_seed(0)
        yield sync
        sync.close()


@pytest.fixture
def bench(
    redis_url: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Bench]]:
    for module in (probe, servers):
        monkeypatch.setattr(module, "POLL_S", 0.01)
    monkeypatch.setattr(probe, "REPORT_EVERY_S", 0.05)
    monkeypatch.setattr(served_weights, "PROBE_LENGTH", 8)  # a pass samples each of them
    with ExitStack() as stack:

        def made(mode: str, *names: str) -> Bench:
            rig = Bench(redis_url, mode, model, tmp_path / "served", stack)
            for name in names or (FIRST,):
                rig.add(name)
            return rig

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
        assert (done.reach is not None) == done.is_served
        published.append(done.is_served)
    return published


NewBench = Callable[..., Bench]


def test_adapters_are_published_at_every_step_after_the_untrained_model(bench: NewBench) -> None:
    rig = bench("lora_only")
    with rig.trainer() as sync:
        optimizer = begun(sync)
        assert sync.begun_as == UNTRAINED
        assert take_steps(sync, optimizer, range(3)) == [True] * 3
        assert sync.server_run_id == rig.run_id
    seen = [(tuple(one.version), one.kind) for one in rig.server.shown.seen]
    assert seen == [((1, 0), BASE), ((1, 1), ADAPTER), ((1, 2), ADAPTER), ((1, 3), ADAPTER)]
    assert names(rig.root) == ["1-2", "1-3"]


def test_a_server_that_has_the_weights_only_renames_them(bench: NewBench) -> None:
    rig = bench("restart")
    with rig.trainer(every_steps=2, last_step=5) as sync:
        optimizer = begun(sync)
        assert take_steps(sync, optimizer, range(4)) == [False, True, False, True]
        state = saved(sync, optimizer)
        assert take_steps(sync, optimizer, range(4, 5)) == [True]
    assert rig.server.loads == [(1, 2), (1, 4), (1, 5)]
    assert all(one.restarts for one in rig.server.shown.seen)

    with rig.trainer(every_steps=2) as sync:  # starts from step 4, while 5 is served
        optimizer = begun(sync, 4, state)
        assert sync.begun_as is None
        take_steps(sync, optimizer, range(4, 6))
        state = saved(sync, optimizer)
    assert rig.server.loads[3:] == [(2, 4), (2, 6)]

    with rig.trainer(every_steps=2) as sync:  # starts from step 6, which is served as (2, 6)
        begun(sync, 6, state)
        assert sync.begun_as == (2, 6)
        assert rig.server.engine.version == (3, 6)
    assert rig.server.loads[5:] == []

    with rig.trainer() as sync:  # from the start again
        begun(sync)
        assert sync.begun_as is None
    assert rig.server.loads[5:] == [(4, 0)]


def test_an_adapter_that_is_loaded_again_from_a_checkpoint_has_the_same_digest(
    bench: NewBench,
) -> None:
    rig = bench("lora_only")
    with rig.trainer() as sync:
        optimizer = begun(sync)
        take_steps(sync, optimizer, range(1))
        state = saved(sync, optimizer)
    with rig.trainer() as sync:
        begun(sync, 1, state)
        assert sync.begun_as == (1, 1)
    assert rig.server.loads == [(1, 1)]


@pytest.mark.parametrize("known_from", ["a directory", "a checkpoint", "Redis", "a server"])
def test_a_run_opens_an_epoch_beyond_every_known_one(known_from: str, bench: NewBench) -> None:
    """A killed trainer may have written or announced weights that are not served yet."""
    rig = bench("none")
    with rig.trainer() as sync:
        optimizer = optimizer_of(sync.load_policy())
        if known_from == "a directory":
            (rig.root / "8-2").mkdir(parents=True)
        elif known_from == "Redis":
            sync.watch.versions.announce(Announcement(epoch=8, step=0, kind=BASE))
        elif known_from == "a server":
            rig.server.shown.becomes(epoch=8)
        last_epoch = 8 if known_from == "a checkpoint" else 1
        assert sync.start(optimizer, step=0, last_epoch=last_epoch) == (9, 0)


def test_a_server_of_another_mode_or_run_is_refused(bench: NewBench) -> None:
    rig = bench("lora_only")
    rig.server.takes_adapters = False
    with rig.trainer() as sync:
        told = "it accepts no adapters: start it with"
        with pytest.raises(PolicyMismatch, match=told):
            sync.load_policy()
        rig.server.takes_adapters = True
        sync.watch.versions.run_id = "other"
        with pytest.raises(PolicyMismatch, match="but the trainer's is 'other'"):
            sync.load_policy()


def test_all_servers_follow_and_each_is_checked_in_its_turn(bench: NewBench) -> None:
    rig = bench("none", "a", "b", "c")
    with rig.trainer(nodes=3) as sync:
        optimizer = begun(sync)
        take_steps(sync, optimizer, range(3))
        late = rig.add("d")
        take_steps(sync, optimizer, range(3, 4))
    # All at the start, when they joined; then one after the other.
    probed = {one.name: [*map(version_id, one.probed)] for one in rig.servers.values()}
    assert probed == {
        "a": ["1-0", "1-3"],
        "b": ["1-0", "1-1", "1-4"],
        "c": ["1-0", "1-2"],
        "d": ["1-4"],
    }
    assert late.loads == [(1, 3), (1, 4)]


def test_one_of_three_that_serves_other_weights_is_named(bench: NewBench) -> None:
    rig = bench("none", "a", "b", "c")
    with rig.trainer(nodes=3) as sync:
        optimizer = begun(sync)
        rig.servers["http://c"].is_stuck = True
        told = "server c at http://c does not serve the trainer's weights: .* without any training"
        take_steps(sync, optimizer, range(1))  # the turn of b
        with pytest.raises(ServedWeightsDiffer, match=told):
            take_steps(sync, optimizer, range(1, 2))


def test_a_server_that_leaves_during_its_check_is_replaced(bench: NewBench) -> None:
    rig = bench("none", "a", "b")
    with rig.trainer(nodes=2) as sync:
        optimizer = begun(sync)
        gone = rig.servers["http://b"]

        def leave() -> None:
            gone.shown.leave()
            gone.fail()

        # Its cache is filled before the publication.
        gone.faults = iter([lambda: None, leave])
        assert take_steps(sync, optimizer, range(1)) == [True]
        assert [*map(version_id, rig.servers["http://a"].probed)] == ["1-0", "1-1"]
        gather_gradient(sync._policy, seed=1)
        optimizer.step(1)
        reach = sync.publish(optimizer, 2).reach
        assert reach is not None
        assert reach.incidents == Incidents(left=1)


def test_a_server_that_is_stopped_during_its_check_does_not_stop_the_trainer(
    bench: NewBench,
) -> None:
    rig = bench("none", "a", "b")
    goes_on = threading.Event()
    with rig.trainer(nodes=2) as sync:
        optimizer = begun(sync)
        stopped = rig.servers["http://b"]

        def stop() -> None:
            stopped.shown.leave()
            goes_on.wait(DEADLINE_S)

        stopped.faults = iter([lambda: None, stop])
        assert take_steps(sync, optimizer, range(1)) == [True]
        assert not goes_on.is_set()
        goes_on.set()


def test_if_the_only_server_with_a_version_leaves_the_trainer_waits_for_the_next(
    bench: NewBench,
) -> None:
    rig = bench("none", "a", "b")
    with rig.trainer(nodes=2) as sync:
        optimizer = begun(sync)
        sync.publisher.wait_s = 0.0
        late, gone = rig.servers["http://a"], rig.servers["http://b"]
        publish, is_alone = sync.publisher.publish, threading.Event()

        def later(shown: StandIn, announced: Announcement) -> None:
            is_alone.wait(DEADLINE_S)
            late._take(shown, announced)

        def leave() -> None:
            gone.shown.leave()
            gone.fail()

        def publish_again(announced: Announcement, sources: list[str]) -> ServedPublication:
            if not gone.shown.speaks:
                is_alone.set()
            return publish(announced, sources)

        late.shown.reply = later
        gone.faults = iter([lambda: None, leave])
        sync.publisher.publish = publish_again  # type: ignore[method-assign]
        assert take_steps(sync, optimizer, range(1)) == [True]
        assert late.probed[-1].step == 1


def test_a_server_that_never_answers_does_not_end_the_run_while_another_serves(
    bench: NewBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "PROBE_DEADLINE_S", 0.0)
    rig = bench("none", "a", "b")
    with rig.trainer(nodes=2) as sync:
        optimizer = begun(sync)
        hung = rig.servers["http://b"]
        hung.faults = itertools.repeat(hung.fail)
        with capture_logs() as logs:
            assert take_steps(sync, optimizer, range(2)) == [True] * 2
        assert {e["server"] for e in logs if e["event"] == "server.unanswered"} == {"b"}
        assert sync.watch.unanswered > 0


def test_a_slow_server_does_not_hold_up_a_step_for_longer_than_publish_wait_s(
    bench: NewBench,
) -> None:
    rig = bench("none", "a", "b")
    answered = threading.Event()
    with rig.trainer(nodes=2) as sync:
        optimizer = begun(sync)
        sync.publisher.wait_s = 0.1
        rig.servers["http://b"].faults = itertools.repeat(lambda: bool(answered.wait()))
        assert take_steps(sync, optimizer, range(2)) == [True] * 2
        answered.set()


def test_servers_that_are_all_slow_are_asked_again_with_more_patience(bench: NewBench) -> None:
    rig = bench("none", "a", "b")
    answered = threading.Event()
    with rig.trainer(nodes=2) as sync:
        optimizer = begun(sync)
        sync.publisher.wait_s = 0.1
        for server in rig.servers.values():
            server.faults = iter([lambda: bool(answered.wait())])
        assert take_steps(sync, optimizer, range(1)) == [True]
        assert sync.watch.unanswered == 2
        for server in rig.servers.values():
            server.faults = itertools.repeat(lambda: bool(answered.wait()))
        with pytest.raises(ServiceUnavailable, match="left while the trainer waited"):
            take_steps(sync, optimizer, range(1, 2))
        assert sync.watch.unanswered == 2 + 6
        answered.set()


def test_servers_can_fetch_the_newest_version_before_they_serve(bench: NewBench) -> None:
    rig = bench("none", "a")
    directory = rig.root / "1-5"
    directory.mkdir(parents=True)
    (directory / "manifest.json").write_text("{}")
    with rig.trainer(nodes=1) as sync:
        server = rig.server.shown
        server.becomes(state=ServerState.JOINING)
        opened = sync.source.open

        def joins() -> list[str]:
            sources = opened()
            assert httpx.get(f"{sources[1]}/1-5/manifest.json", trust_env=False).is_success
            server.becomes(state=ServerState.SERVING)
            return sources

        sync.source.open = joins  # type: ignore[method-assign]
        begun(sync)


@pytest.mark.parametrize("change", [{"started": 7.0}, {"crashes": 1}])
def test_another_server_of_a_name_and_another_engine_are_checked_again(
    change: dict[str, Any], bench: NewBench
) -> None:
    rig = bench("none", "a", "b")
    with rig.trainer(nodes=2) as sync:
        take_steps(sync, begun(sync), range(1))
        assert sync.watch.unchecked(["a", "b"]) == []
        rig.servers["http://b"].shown.becomes(**change)
        sync.watch.servers()
        assert sync.watch.unchecked(["a", "b"]) == ["b"]


def test_a_server_of_another_data_type_is_refused_at_the_start(bench: NewBench) -> None:
    rig = bench("none", "a", "b")
    rig.servers["http://b"].dtype = "bfloat16"
    for dtype, told in (
        ("float32", "--dtype float32, but the server's weights are in bfloat16"),
        ("auto", r"different data types \(a float32, b bfloat16\); start all .* same --dtype"),
    ):
        with rig.trainer(nodes=2, dtype=dtype) as sync, pytest.raises(PolicyMismatch, match=told):
            sync.load_policy()


CRASHED = "engine.crashed_during_check"
FIRST_REQUEST = {
    "restart": "the logprobs of 8 tokens",
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
        assert rig.server.shown.says.crashes == 2


@pytest.mark.parametrize("fault", ["crash_and_fail", "crash"])
def test_an_engine_that_is_killed_once_during_a_request_is_logged(
    fault: str, bench: NewBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client repeats a lost request by itself, so that the crash may not be seen as a failure.
    A request that waits for a slow start still gets its second chance."""
    monkeypatch.setattr(probe, "PROBE_DEADLINE_S", 0.0)
    rig = bench("restart")
    with rig.trainer() as sync:
        optimizer = begun(sync)
        rig.server.crash()  # of an earlier engine: it does not count
        rig.server.faults = iter([getattr(rig.server, fault)])
        with capture_logs() as logs:
            assert take_steps(sync, optimizer, range(1)) == [True]
    crashes = [event["request"] for event in logs if event["event"] == CRASHED]
    assert crashes == ["the logprobs of 8 tokens"]


def test_a_server_that_serves_without_an_answer_is_unavailable(
    bench: NewBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "PROBE_DEADLINE_S", 0.0)
    rig = bench("none")
    with rig.trainer() as sync:
        optimizer = begun(sync)
        rig.server.faults = itertools.repeat(rig.server.fail)
        with pytest.raises(ServiceUnavailable, match="no answer"):
            take_steps(sync, optimizer, range(1))


def test_versions_go_by_files_if_no_server_can_join_a_group(bench: NewBench) -> None:
    rig = bench("update")
    with rig.trainer(collective=True) as sync, capture_logs() as logs:
        optimizer = begun(sync)
        take_steps(sync, optimizer, range(2))
        assert sync.watch.by_files == 2
    assert rig.server.loads == [(1, 1), (1, 2)]
    reasons = [entry["reason"] for entry in logs if entry["event"] == "weights.by_files"]
    assert reasons == ["no server can join a process group"] * 2


@pytest.mark.parametrize("is_newer", [False, True])
def test_a_server_without_a_source_gets_files_of_the_policy(
    is_newer: bool, bench: NewBench
) -> None:
    """Also if the policy has gone on since the version that the server lacks."""
    rig = bench("update")
    with rig.trainer(every_steps=2, collective=True) as sync:
        optimizer = begun(sync)
        take_steps(sync, optimizer, range(3 if is_newer else 2))
        shutil.rmtree(rig.root / "1-2")  # as if it had gone through a group
        announced, counted = len(rig.server.shown.seen), sync.watch.by_files
        rig.server.shown.becomes(lacks="1-2")
        sync.watch.servers()
        assert names(rig.root) == ["1-3" if is_newer else "1-2"]
        sync.watch.servers()
        assert sync.watch.by_files == counted + 1
        head = sync.watch.versions.head()
        assert head is not None
        assert head.id == names(rig.root)[0]
        sources = rig.server.shown.redis.smembers(sources_key(rig.run_id, head.version))
        assert sources == set(sync._sources)
    assert len(rig.server.shown.seen) - announced <= is_newer


def test_a_version_that_was_lost_with_all_servers_holds_up_no_restart(bench: NewBench) -> None:
    """Trainer and servers ended together, and the version had gone through a process group."""
    rig = bench("update")
    with rig.trainer(collective=True) as sync:
        optimizer = begun(sync)
        take_steps(sync, optimizer, range(2))
        state = saved(sync, optimizer)
    server = rig.server.shown
    with rig.trainer(collective=True) as sync:
        begun(sync, 2, state)
    assert server.seen[-1].id == "2-2"  # it served: nothing was lost
    shutil.rmtree(rig.root / "2-2")
    server.becomes(state=ServerState.JOINING, lacks="2-2")
    with rig.trainer(collective=True) as sync:
        awaited = sync.watch.versions.head

        def joins() -> BridgeInfo:
            head = awaited()
            assert head is not None
            assert (head.id, head.kind) == ("3-0", BASE)
            server.becomes(state=ServerState.SERVING, lacks="")
            wait_for(lambda: rig.server.engine.version == head.version)  # it loads no more
            return StandInServer.info(rig.server)

        rig.server.info = joins  # type: ignore[method-assign]
        begun(sync, 2, state)
        assert sync.version == (4, 2)
    assert rig.server.loads[-2:] == [(3, 0), (4, 2)]


@pytest.mark.parametrize("steps", [0, 3])
def test_files_that_a_server_cannot_read_are_not_written_again(steps: int, bench: NewBench) -> None:
    """Also between two publications, when there are no files of the policy."""
    rig = bench("update")
    with rig.trainer(every_steps=2) as sync:
        take_steps(sync, begun(sync), range(steps))
        rig.server.shown.becomes(lacks="1-2" if steps else "1-0")
        sync.watch.servers()
        assert names(rig.root) == (["1-2"] if steps else [])
        assert sync.watch.by_files == 0
