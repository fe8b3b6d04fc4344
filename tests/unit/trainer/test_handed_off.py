"""A trainer that hands its weights over, against a stand-in server and a real Redis: what it
publishes when, under which name, and what it leaves on the disk."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from grpo_core.handoff import Action, Command, OutcomeState
from grpo_core.inference_client import BridgeInfo, Completion
from grpo_core.weight_files import WeightKind, check_weights
from grpo_core.wire import PolicyVersion
from grpo_trainer.errors import PolicyMismatch, ServedWeightsDiffer
from grpo_trainer.optimizer import MasterOptimizer
from grpo_trainer.trained_weights import Adapter, WholeModel
from grpo_trainer.weight_sync.handed_off import Cadence, HandedOff
from grpo_trainer.weight_sync.handoff import Handoff
from grpo_trainer.weight_sync.handoff_link import HandoffLink
from grpo_trainer.weight_sync.served_files import ServedFiles
from grpo_trainer.weight_sync.supervisor_watch import SupervisorWatch
from tests.unit.trainer.hand_off_stand_in import StandIn as StandInSupervisor
from tests.unit.trainer.test_served_proof import StandIn as StandInModel
from tests.unit.trainer.tiny_policy import LORA, gather_gradient, model_directory, optimizer_of

ACTIONS = {"lora_only": Action.LOAD_ADAPTER, "none": Action.RESTART_WITH_CHECKPOINT}


class StandInServer:
    """Supervisor and engine: takes weights as the real one does, and computes with them."""

    base_url = "http://server"

    def __init__(self, supervisor: StandInSupervisor, model: Path, root: Path, lora: bool) -> None:
        self._supervisor, self._model, self._root = supervisor, str(model), root
        self._lora = lora
        self._engine = StandInModel(self._base())
        self.load = True
        self.version = PolicyVersion(0, 0)

    def _base(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self._model, dtype=torch.float32).eval()

    def take(self, supervisor: StandInSupervisor, command: Command) -> None:
        directory = check_weights(command.action.kind, command.path, command.sha256, self._root)
        if self.load:
            self._engine.swap(self._loaded(command.action.kind, directory), command.version)
        self._engine.version = self.version = command.version
        supervisor.serve(command)
        supervisor.says = supervisor.says.model_copy(update={"kind": command.action.kind.value})
        supervisor.answer(command, OutcomeState.DONE, in_use=json.dumps([]))

    def _loaded(self, kind: WeightKind, directory: Path) -> Any:
        if kind is WeightKind.ADAPTER:
            return PeftModel.from_pretrained(self._base(), str(directory)).eval()
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def info(self) -> BridgeInfo:
        return BridgeInfo(
            policy_version=self.version,
            paused=False,
            weights_intact=True,
            weights_socket=None,
            dtype="float32",
            max_model_len=256,
            kv_block_size=16,
            lora_enabled=self._lora,
        )

    def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        return self._engine.served_logprobs(token_ids)

    def sample(self, prompt_token_ids: list[int], max_tokens: int, **_: Any) -> Completion:
        return self._engine.sample(prompt_token_ids, max_tokens)

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class Bench:
    """One server, and as many trainers one after the other as a test wants."""

    url: str
    run_id: str
    mode: str
    model: Path
    root: Path
    server: StandInServer
    supervisor: StandInSupervisor

    @contextmanager
    def trainer(
        self, every_steps: int = 1, last_step: int = 100, link_s: float = 60.0
    ) -> Iterator[HandedOff]:
        link = HandoffLink(self.url, self.run_id, link_s)
        watch = SupervisorWatch(link, return_deadline_s=60.0)
        action = ACTIONS[self.mode]
        adapter = action.kind is WeightKind.ADAPTER
        sync = HandedOff(
            self.server,  # type: ignore[arg-type]
            link,
            watch,
            Handoff(link, watch, action, deadline_s=60.0),
            Adapter(str(self.model), LORA) if adapter else WholeModel(str(self.model)),
            ServedFiles(self.root),
            "auto",
            "cpu",
            Cadence(every_steps, last_step, at_start=not action.restarts),
        )
        torch.manual_seed(0)
        yield sync
        sync.close()

    @property
    def asked_for(self) -> list[PolicyVersion]:
        return [command.version for command in self.supervisor.seen]

    @property
    def on_disk(self) -> list[str]:
        return sorted(path.name for path in self.root.iterdir())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory(tmp_path_factory.mktemp("tiny") / "model")


@contextmanager
def bench(mode: str, redis_url: str, model: Path, root: Path, **changes: Any) -> Iterator[Bench]:
    run_id, replies = uuid.uuid4().hex[:8], iter(lambda: lambda s, c: server.take(s, c), None)
    with StandInSupervisor(redis_url, run_id, replies) as supervisor:  # type: ignore[arg-type]
        lora = changes.get("lora", mode != "none")
        server = StandInServer(supervisor, model, root, lora)
        yield Bench(redis_url, run_id, mode, model, root, server, supervisor)


def begun(sync: HandedOff, step: int = 0, epoch: int = 0) -> MasterOptimizer:
    optimizer = optimizer_of(sync.load_policy())
    sync.start(optimizer, step, epoch)
    return optimizer


def take_steps(sync: HandedOff, optimizer: MasterOptimizer, steps: range) -> list[bool]:
    """Whether each was published."""
    published = []
    for step in steps:
        gather_gradient(sync._policy, seed=step)
        done = sync.apply(optimizer, step)
        assert done.version.step == step + 1
        assert (done.alignment is not None) == done.is_served == (done.publish_s > 0)
        published.append(done.is_served)
    return published


def test_adapters_go_out_at_the_start_and_at_every_step(
    redis_url: str, model: Path, tmp_path: Path
) -> None:
    with bench("lora_only", redis_url, model, tmp_path / "served") as rig:
        with rig.trainer() as sync:
            optimizer = begun(sync)
            assert take_steps(sync, optimizer, range(3)) == [True] * 3
            assert sync.begun_as is None
        assert rig.asked_for == [(1, 0), (1, 1), (1, 2), (1, 3)]
        assert rig.on_disk == ["epoch_1_step_2", "epoch_1_step_3"]


def test_a_restart_is_saved_where_the_server_has_the_weights(
    redis_url: str, model: Path, tmp_path: Path
) -> None:
    with bench("none", redis_url, model, tmp_path / "served") as rig:
        with rig.trainer(every_steps=2, last_step=5) as sync:
            optimizer = begun(sync)
            assert sync.begun_as == (0, 0)
            assert take_steps(sync, optimizer, range(4)) == [False, True, False, True]
            saved = {n: t.clone() for n, t in optimizer.tensors(names(sync)).items()}
            assert take_steps(sync, optimizer, range(4, 5)) == [True]
        assert rig.asked_for == [(1, 2), (1, 4), (1, 5)]

        with rig.trainer(every_steps=2) as sync:  # from step 4, and 5 is served
            again = resumed(sync, saved, step=4)
            assert sync.begun_as is None
            take_steps(sync, again, range(4, 6))
        assert rig.asked_for[3:] == [(2, 4), (2, 6)]

        with rig.trainer(every_steps=2) as sync:  # from step 6, which is served as (2, 6)
            resumed(sync, {n: t.clone() for n, t in again.tensors(names(sync)).items()}, step=6)
            assert sync.begun_as == (2, 6)
        assert rig.asked_for[5:] == []


def resumed(sync: HandedOff, tensors: dict[str, torch.Tensor], step: int) -> MasterOptimizer:
    optimizer = optimizer_of(sync.load_policy(restoring=True))
    optimizer.load_tensors(names(sync), tensors)
    sync.start(optimizer, step, last_epoch=1)
    return optimizer


def names(sync: HandedOff) -> list[str]:
    policy = sync._policy if sync._policy is not None else sync.load_policy()
    return [name for name, p in policy.named_parameters() if p.requires_grad]


def test_a_new_run_on_a_server_that_serves_an_old_one_restarts_it(
    redis_url: str, model: Path, tmp_path: Path
) -> None:
    with bench("none", redis_url, model, tmp_path / "served") as rig:
        with rig.trainer(every_steps=1) as sync:
            take_steps(sync, begun(sync), range(1))
        with rig.trainer(every_steps=1) as sync:
            begun(sync)
            assert sync.begun_as is None
        assert rig.asked_for == [(1, 1), (2, 0)]


def test_an_epoch_is_opened_beyond_all_that_were_ever_asked_for(
    redis_url: str, model: Path, tmp_path: Path
) -> None:
    """A trainer that was killed may have written or asked for what nobody serves yet."""
    root = tmp_path / "served"
    (root / "epoch_6_step_2").mkdir(parents=True)
    with bench("none", redis_url, model, root) as rig, rig.trainer() as sync:
        optimizer = optimizer_of(sync.load_policy())
        assert sync.start(optimizer, step=0, last_epoch=4) == (7, 0)


def test_weights_that_are_announced_and_not_loaded_do_not_count(
    redis_url: str, model: Path, tmp_path: Path
) -> None:
    with bench("none", redis_url, model, tmp_path / "served") as rig:
        with rig.trainer() as sync:
            optimizer = begun(sync)
            rig.server.load = False
            with pytest.raises(ServedWeightsDiffer, match="that it was started with"):
                take_steps(sync, optimizer, range(1))
        assert rig.on_disk == ["epoch_1_step_1"]


def test_a_server_of_another_mode_or_run_is_refused(
    redis_url: str, model: Path, tmp_path: Path
) -> None:
    with (
        bench("lora_only", redis_url, model, tmp_path / "a", lora=False) as rig,
        rig.trainer() as sync,
        pytest.raises(PolicyMismatch, match="it takes no adapters: start vllm-api-server with"),
    ):
        sync.load_policy()
    with bench("none", redis_url, model, tmp_path / "b") as rig, rig.trainer(link_s=2.0) as sync:
        rig.server.version = PolicyVersion(3, 1)  # Redis has the link's deadline to agree
        with pytest.raises(PolicyMismatch, match=r"\(3, 1\).*\(0, 0\): they are two"):
            sync.load_policy()
