"""How a trainer attaches to a server: by its version, its state, and its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from grpo_core.clients.inference import BridgeClient, BridgeInfo
from grpo_core.errors import RequestRefused, ServiceUnavailable
from grpo_core.tree.trainer_command import CommandLine
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.checkpoint.store import OpenedEpochs
from grpo_trainer.errors import EngineCrashed, ServedWeightsDiffer, TornWeights
from grpo_trainer.weight_sync import probe
from grpo_trainer.weight_sync.attachment import ServerConnection
from grpo_trainer.weight_sync.build import build_weight_sync
from grpo_trainer.weight_sync.shared import SharedVllm, _usable_after
from tests.support.http_stub import Answer, Route, stub_server

OURS = PolicyVersion(3, 7)
PAUSE = "POST /bridge/pause?writing=false"


def info(version: tuple[int, int], state: str, intact: bool = True) -> BridgeInfo:
    return BridgeInfo(
        policy_version=version, paused=False, weights_intact=intact, weights_socket="s", state=state
    )


@pytest.mark.parametrize(
    ("state", "served", "expected"),
    [
        # The restarted server accepts only the version that it lost.
        ("awaiting_weights", (3, 7), (3, 7)),
        ("failed", (3, 7), (3, 7)),
        # The server missed the last publication, or is new to the run.
        ("awaiting_weights", (3, 6), (3, 7)),
        ("serving", (0, 0), (3, 7)),
        # The pause ended under the server's own version, then the server restarted.
        ("awaiting_weights", (4, 7), (5, 7)),
        ("serving", (4, 7), (5, 7)),
        # The server is alive and has already used this version.
        ("serving", (3, 7), (4, 7)),
    ],
)
def test_the_version_after_a_return(
    state: str, served: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert _usable_after(OURS, info(served, state)) == expected


def test_an_epoch_that_was_opened_is_opened_no_second_time(tmp_path: Path) -> None:
    """An earlier trainer started the epoch and died before its next checkpoint; the server
    restarted since."""

    def open_after(last_epoch: int, of_server: int = 1) -> int:
        def write(version: PolicyVersion) -> None:
            # The epoch must be recorded before the server learns it.
            assert OpenedEpochs(tmp_path).newest() == version.epoch

        options = {"mode": "shared_vllm", "save_path": tmp_path, "verify_every_steps": 0}
        chosen = CommandLine.model_validate({"model": "model", **options}).settings()
        with contextlib.closing(build_weight_sync(chosen)) as built:
            sync: Any = built
            sync._server.is_lost = lambda: False
            sync._version, sync._write = PolicyVersion(of_server, 0), write
            sync._policy = nn.Linear(1, 1)
            opened: PolicyVersion = sync.start(optimizer=None, step=6, last_epoch=last_epoch)
            return opened.epoch

    assert [open_after(3), open_after(3), open_after(9), open_after(3, 12)] == [4, 5, 10, 12]


@pytest.mark.parametrize("state", ["serving", "awaiting_weights", "failed"])
def test_half_an_update_is_refused_in_every_state(state: str) -> None:
    with BridgeClient("http://127.0.0.1:1") as bridge:
        sync = SharedVllm(ServerConnection(bridge), "model")
        sync._refuse_torn(info((3, 7), state))
        with pytest.raises(TornWeights, match="may hold part of an update"):
            sync._refuse_torn(info((3, 7), state, intact=False))


class LostAttachment:
    """Acts as `Attachment`; the server closes its end of the connection once `ended` is set."""

    session = "s"

    def __init__(self) -> None:
        self.ended = False
        self.weights: Any = self
        self.connection: Any = self

    def server_has_closed(self) -> bool:
        return self.ended

    def wait_until_written(self) -> None:
        """There is nothing to wait for."""

    def write_into_parameters(self, may_write: Callable[[], None]) -> None:
        """Stands for the optimizer's method, with a model of three parts."""
        for _ in range(3):
            may_write()

    def close(self) -> None:
        """Nothing to close."""


def test_no_request_is_repeated_to_a_server_whose_weight_socket_has_closed() -> None:
    """Its memory stays mapped until the write has failed, but the next server may need it."""
    held: Any = LostAttachment()

    def ends(_body: dict[str, Any]) -> Answer:
        held.ended = True
        return 503, {}

    routes: dict[str, Route] = {
        PAUSE: lambda _body: (200, {"lease_s": 30}),
        "POST /bridge/pause": lambda _body: (200, {"lease_s": 30}),
        "POST /bridge/resume": ends,
    }
    with stub_server(routes) as server, BridgeClient(server.url, deadline_s=1.0) as bridge:
        sync = SharedVllm(ServerConnection(bridge), "model")
        sync._server._attachment = sync._optimizer = held
        with pytest.raises(ServiceUnavailable, match="has ended"):
            sync._write(OURS)
        assert [name for name, _ in server.seen] == [
            PAUSE,
            "POST /bridge/pause",
            "POST /bridge/resume",
        ]


def test_a_trainer_whose_lease_is_over_asks_before_it_writes_on() -> None:
    answers = iter([(200, {"lease_s": 0}), (409, {"detail": "its lease expired"})])
    routes: dict[str, Route] = {
        PAUSE: lambda _body: (200, {"lease_s": 0}),
        "POST /bridge/pause": lambda _body: next(answers),
    }
    with stub_server(routes) as server, BridgeClient(server.url, deadline_s=1.0) as bridge:
        sync = SharedVllm(ServerConnection(bridge), "model")
        held: Any = LostAttachment()
        sync._server._attachment = sync._optimizer = held
        with pytest.raises(RequestRefused, match="its lease expired"):
            sync._write(OURS)


@pytest.mark.parametrize("crashes", [1, 2])
def test_a_check_that_crashes_the_engine_twice_ends_the_run(
    crashes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "POLL_S", 0.0)
    held, left, returned = LostAttachment(), crashes, 0

    def prompt_logprobs(_tokens: list[int]) -> list[float]:
        nonlocal left
        if not left:
            return [-1.0]
        left, held.ended = left - 1, True
        raise ServiceUnavailable("it has ended")

    def reattach(_why: str) -> None:
        nonlocal returned
        returned += 1
        held.ended = False

    with BridgeClient("http://127.0.0.1:1") as bridge:
        sync: Any = SharedVllm(ServerConnection(bridge), "model")
        sync._server._attachment = held
        sync._reattach, sync._publish = reattach, lambda _step: OURS
        sync.bridge = SimpleNamespace(prompt_logprobs=prompt_logprobs)
        if crashes == 1:
            assert sync.served_logprobs([3, 4]) == [-1.0]
        else:
            with pytest.raises(EngineCrashed, match=r"2 times .* the logprobs of 2 tokens"):
                sync.served_logprobs([3, 4])
        assert returned == 1  # after the second crash, nothing is waited for


def test_the_first_update_and_every_third_are_checked_and_must_be_written() -> None:
    with BridgeClient("http://127.0.0.1:1") as bridge:
        sync: Any = SharedVllm(ServerConnection(bridge), "model", verify_every_steps=3)
        sync._check = SimpleNamespace(require=lambda _version, label: label)
        sync._optimizer = SimpleNamespace(masters=[0], unwritten_parameters=lambda: 0)
        labels = [f"After step {step - 1}" if step in (1, 3, 6) else None for step in range(1, 8)]
        assert [sync._check_if_due(step) for step in range(1, 8)] == labels
        sync._optimizer.unwritten_parameters = lambda: 1
        with pytest.raises(ServedWeightsDiffer, match="After step 2, 1 of 1 parameters"):
            sync._check_if_due(3)
