"""The supervisor's answers to commands at awkward moments. Its engines only record how they were
launched."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from grpo_core.tree.server import load_server_settings
from grpo_core.weights.directory_checks import directory_digest
from grpo_core.weights.ref import WeightKind, WeightRef
from grpo_core.weights.supervisor import (
    Action,
    Outcome,
    OutcomeState,
    SupervisorCommand,
    SupervisorStatus,
)
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.engine_protocol import SupervisorEnd
from grpo_vllm.supervisor.commands import ControlPlane
from grpo_vllm.supervisor.supervisor import Supervisor
from grpo_vllm.weights.served_store import ServedWeights
from tests.support.wait import wait_for_async
from tests.unit.vllm.fake_engine import Record


class Engine:
    """An engine that ends when it is told to drain."""

    pid = 1

    def __init__(self) -> None:
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def drain(self, _within_s: float) -> None:
        self.end(0)

    async def ended_within(self, _seconds: float) -> bool:
        return True

    def end(self, code: int) -> None:
        if not self.ended.done():
            self.ended.set_result(code)


class Slot:
    """`seen`: the engine's own status; `broken`: versions with which no engine starts."""

    generation_tokens = 0
    answers = True

    def __init__(self, *_: object) -> None:
        self.launched: list[WeightRef] = []
        self.engine: Engine | None = None
        self.channel = SupervisorEnd()
        self.seen: dict[str, Any] | None = None
        self.broken: set[PolicyVersion] = set()

    async def measure_memory(self) -> None: ...

    async def launch(self, weights: WeightRef) -> Engine:
        self.launched.append(weights)
        self.engine = Engine()
        if weights.version in self.broken:
            self.engine.end(3)
            self.channel.serving.clear()
        else:
            self.channel.serving.set()
        return self.engine

    async def look(self) -> dict[str, Any] | None:
        return self.seen

    async def end(self) -> int:
        assert self.engine is not None
        self.engine.end(0)
        code, self.engine = self.engine.ended.result(), None
        return code


class Control(ControlPlane):
    """`answers`: each with the last launched weights at that moment."""

    def __init__(self, slot: Slot) -> None:
        self.sent: asyncio.Queue[SupervisorCommand] = asyncio.Queue()
        self.answers: list[tuple[OutcomeState, PolicyVersion]] = []
        self.reports = 0
        self._slot = slot

    async def commands(self) -> AsyncIterator[list[SupervisorCommand]]:
        while True:
            yield [await self.sent.get()]

    async def answer(self, _command: SupervisorCommand, outcome: Outcome) -> None:
        self.answers.append((outcome.state, self._slot.launched[-1].version))

    async def report(self, _status: SupervisorStatus) -> None:
        self.reports += 1


class HeldRecord(Record):
    """Saving waits until `free` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.free = asyncio.Event()
        self.free.set()

    async def save(self, served: ServedWeights) -> None:
        await super().save(served)
        await self.free.wait()


class Rig:
    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.slot = Slot()
        self.control, self.record = Control(self.slot), HeldRecord()
        monkeypatch.setattr("grpo_vllm.supervisor.supervisor.EngineSlot", lambda *_: self.slot)
        settings = load_server_settings(["--model", "m", "--weights-dir", str(directory)])
        first = WeightRef(
            version=PolicyVersion(1, 1), kind=WeightKind.CHECKPOINT, path=self.checkpoint(1)
        )
        nothing: Any = None
        self.supervisor = Supervisor(settings, nothing, first, self.control, self.record, nothing)

    def checkpoint(self, step: int) -> Path:
        path = self.directory / str(step)
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text("{}")
        (path / "model.safetensors").write_text(str(step))
        return path

    def send(self, step: int) -> None:
        path, action = self.checkpoint(step), Action.RESTART_WITH_CHECKPOINT
        identity = {"id": f"c-{step}", "path": str(path), "sha256": directory_digest(path)}
        self.control.sent.put_nowait(
            SupervisorCommand(action=action, epoch=1, step=step, **identity)
        )

    def crash(self) -> None:
        assert self.slot.engine is not None
        self.slot.engine.end(9)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        running = asyncio.create_task(self.supervisor.run())
        try:
            await wait_for_async(self.supervisor.ready)
            yield
        finally:
            self.record.free.set()
            self.supervisor.stop()
            assert await running == 0

    async def answers(self, number: int) -> None:
        await wait_for_async(lambda: len(self.control.answers) == number)


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tmp_path, monkeypatch)


async def test_done_is_answered_for_weights_that_were_launched_alone(rig: Rig) -> None:
    """A command is accepted while the supervisor records the weights of a recovered engine."""
    async with rig.serving():
        rig.record.free.clear()
        noted = len(rig.record.saved)
        rig.crash()
        await wait_for_async(lambda: len(rig.record.saved) > noted)
        rig.send(2)
        await rig.answers(1)
        rig.record.free.set()
        await rig.answers(2)
    assert rig.control.answers == [(OutcomeState.ACCEPTED, (1, 1)), (OutcomeState.DONE, (1, 2))]


async def test_an_engine_that_ends_before_the_answer_has_not_done_it(rig: Rig) -> None:
    async with rig.serving():
        rig.record.free.clear()
        rig.send(2)
        await wait_for_async(lambda: len(rig.record.saved) == 2)
        rig.crash()
        rig.record.free.set()
        await rig.answers(2)
        await wait_for_async(lambda: len(rig.slot.launched) == 3)
    assert rig.control.answers[1][0] is OutcomeState.FAILED
    assert [weights.version.step for weights in rig.slot.launched] == [1, 2, 1]


async def test_an_adapter_that_vanishes_while_it_is_looked_at_ends_nothing(rig: Rig) -> None:
    """An operator loaded the missing adapter. The last served weights are those that a new engine
    can load."""

    def seen(directory: Path) -> dict[str, Any]:
        adapter = {"adapter_path": str(directory)}
        return {"reason": "", "policy_version": [1, 5], "adapter": adapter}

    async with rig.serving():
        rig.slot.seen = seen(rig.directory / "gone")
        reports = rig.control.reports
        await wait_for_async(lambda: rig.control.reports > reports + 2)
        assert rig.supervisor.status().step == 1
        rig.slot.seen = seen(rig.checkpoint(5))
        await wait_for_async(lambda: rig.supervisor.status().step == 5)
        assert rig.record.saved[-1].weights.path == rig.checkpoint(5)
        rig.slot.broken = {PolicyVersion(1, 6)}
        rig.send(6)
        await wait_for_async(lambda: len(rig.slot.launched) == 3)
        await rig.answers(2)
    assert [weights.version.step for weights in rig.slot.launched] == [1, 6, 5]
    assert rig.control.answers[-1][0] is OutcomeState.FAILED
