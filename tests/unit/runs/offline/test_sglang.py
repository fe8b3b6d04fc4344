"""The SGLang backend: its clients against answers that a real server gave, and its publications
against a stand-in that computes with real weights.

`sglang_answers.json` holds requests to SGLang 0.5.23 with the tiny model, and its answers.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_core.clients.inference import Completion
from grpo_core.errors import ProtocolViolation, RequestRefused
from grpo_core.tree.weights import LoraOptions
from grpo_core.wire.policy_version import PolicyVersion
from grpo_runs.offline.errors import ServerUnsuitable
from grpo_runs.offline.sglang import (
    SERVICE,
    UNTRAINED,
    ServerInfo,
    SglangClient,
    SglangGeneration,
    SglangWeights,
)
from grpo_trainer.errors import PolicyMismatch, ServedWeightsDiffer, WeightsRefused
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.weight_sync.directories import VersionDirectories
from tests.support.directories import names
from tests.support.http_stub import Route, StubServer, stub_server
from tests.unit.trainer.served_model import ServedModel
from tests.unit.trainer.tiny_policy import LORA, gather_gradient, optimizer_of

RECORDED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("sglang_answers.json").read_text()
)
PROMPT: list[int] = RECORDED["one"]["request"]["input_ids"]
UNPUBLISHED = PolicyVersion(1, 0)
"""Named by the recorded answers before the publication of 3.12."""


class Replay(dict[str, Route]):
    """Answers with records, in their order, whatever is asked."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any]] = []
        self.stub = StubServer("", self)

    def give(self, *recorded: str | dict[str, Any]) -> None:
        """Args: names of records, or answers."""
        for one in recorded:
            of_dict: dict[str, Any] = {"status": 200, "answer": one}
            record = RECORDED[one] if isinstance(one, str) else of_dict
            self.answers.append((record["status"], record["answer"]))

    def __missing__(self, _name: str) -> Route:
        return lambda _body: self.answers.pop(0)

    @property
    def url(self) -> str:
        return self.stub.url

    @property
    def requests(self) -> list[tuple[str, Any]]:
        """Path and body of each."""
        return [(name.partition(" ")[2], body) for name, body in self.stub.seen]


@pytest.fixture
def replay() -> Iterator[Replay]:
    replay = Replay()
    with stub_server(replay) as replay.stub:
        yield replay


async def completions(
    replay: Replay, recorded: str | dict[str, Any], **sampling: Any
) -> list[Completion]:
    replay.give(recorded)
    async with SglangGeneration(SERVICE, replay.url, 30.0, 30.0, 4) as generation:
        answer = await generation.generate(PROMPT, **sampling)
    assert answer.prompt_token_ids == PROMPT
    return answer.completions()


async def test_the_request_has_sglangs_names(replay: Replay) -> None:
    """The records were made with these requests, which the real server took. What decides the
    distribution is always sent; else SGLang takes the values of the model's configuration."""
    await completions(replay, "one", max_tokens=4)
    reshaping = {"temperature": 0.7, "top_p": 0.9, "top_k": 5}
    await completions(replay, "several", n=3, max_tokens=1, ignore_eos=True, **reshaping)
    await completions(replay, "stop_text", n=2, max_tokens=4, temperature=0.0, stop=["7"])
    assert replay.requests == [
        ("/generate", RECORDED[one]["request"]) for one in ("one", "several", "stop_text")
    ]


async def test_completions_are_read_with_their_version(replay: Replay) -> None:
    [found] = await completions(replay, "one", max_tokens=4)
    assert (found.text, found.finish_reason, found.token_ids) == ("6", "stop", [21, 258])
    assert found.logprobs == [-1.463852882385254, -0.017502475529909134]
    assert found.first_version == found.last_version == UNPUBLISHED
    several = await completions(replay, "several", n=3, max_tokens=1)
    assert [one.finish_reason for one in several] == ["length"] * 3
    published = await completions(replay, "published", n=2, max_tokens=1)
    assert {one.last_version for one in published} == {(3, 12)}


async def test_the_versions_of_the_first_and_the_last_token_are_read(replay: Replay) -> None:
    answer = copy.deepcopy(RECORDED["one"]["answer"])
    answer["meta_info"]["weight_versions"] = [
        {"version": "default", "start": 0, "end": 1},
        {"version": "3.12", "start": 1, "end": 2},
    ]
    [found] = await completions(replay, answer, max_tokens=4)
    assert (found.first_version, found.last_version) == (UNTRAINED, (3, 12))


async def test_the_text_ends_as_vllms(replay: Replay) -> None:
    """vLLM leaves out a stop text, and bytes at the end that are no character."""
    assert [c.text for c in await completions(replay, "stop_text", n=2, max_tokens=4)] == ["", ""]
    assert RECORDED["cut_character"]["answer"]["text"] == "'\ufffd\ufffd"
    [cut] = await completions(replay, "cut_character", max_tokens=3)
    assert (cut.text, len(cut.token_ids)) == ("'", 3)


@pytest.mark.parametrize(
    ("recorded", "reason"),
    [
        ("refused", "temperature must be"),
        ("unknown_parameter", "unknown field `nonsense`"),
        ("too_long", "longer than the model's context length"),
    ],
)
async def test_a_refusal_names_the_reason(replay: Replay, recorded: str, reason: str) -> None:
    with pytest.raises(RequestRefused, match=reason):
        await completions(replay, recorded, max_tokens=4)


@pytest.mark.parametrize("logprob", [None, "-0.1"])
async def test_a_logprob_that_is_no_number_is_an_error(replay: Replay, logprob: Any) -> None:
    answer = copy.deepcopy(RECORDED["one"]["answer"])
    answer["meta_info"]["output_token_logprobs"][0][1 if logprob else 0] = logprob
    with pytest.raises(ProtocolViolation, match="SGLang"):
        await completions(replay, answer, max_tokens=4)


def test_the_trainers_client_reads_the_prompts_logprobs(replay: Replay) -> None:
    request = RECORDED["prompt"]["request"]
    entries = RECORDED["prompt"]["answer"]["meta_info"]["input_token_logprobs"]
    with SglangClient(SERVICE, replay.url, 60.0, 60.0) as client:
        replay.give("prompt", "prompt")
        assert client.prompt_logprobs(request["input_ids"]) == [entry[0] for entry in entries[1:]]
        assert replay.requests == [("/generate", request)]
        with pytest.raises(ProtocolViolation, match="input_token_logprobs"):
            client.prompt_logprobs([1, 2, 3])


def test_the_trainers_client_publishes_and_reads_versions(replay: Replay) -> None:
    with SglangClient(SERVICE, replay.url, 60.0, 60.0) as client:
        replay.give("server_info", "loaded", "model_info_after", "not_loaded")
        info = client.info()
        assert (info.torch_dtype, info.page_size, info.max_req_input_len) == ("float32", 1, 2042)
        client.load_weights(Path("/weights/epoch_3_step_12"), PolicyVersion(3, 12))
        assert replay.requests[-1] == (RECORDED["loaded"]["path"], RECORDED["loaded"]["request"])
        assert client.weight_version() == (3, 12)
        with pytest.raises(WeightsRefused, match=r"3\.13 from .*the same path"):
            client.load_weights(Path("/weights/3-13"), PolicyVersion(3, 13))
        replay.give({"weight_version": "default"})
        assert client.weight_version() is None


@dataclass
class StandIn:
    """An SGLang server that computes with real weights. `ignores`: it names a new version and keeps
    the weights."""

    model: str
    base_url: str = "http://server"
    dtype: str = "float32"
    ignores: bool = False
    named: PolicyVersion | None = None
    loaded: list[PolicyVersion] = field(default_factory=list)
    engine: ServedModel = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.engine, self.named = ServedModel(_loaded(self.model)), None

    def info(self) -> ServerInfo:
        return ServerInfo(dtype=self.dtype, page_size=1, max_req_input_len=250)

    def weight_version(self) -> PolicyVersion | None:
        return self.named

    def load_weights(self, directory: Path, version: PolicyVersion) -> None:
        assert directory.is_absolute()
        self.loaded.append(version)
        self.named = self.engine.version = version
        if not self.ignores:
            self.engine.swap(_loaded(directory), version)

    def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        return self.engine.served_logprobs(token_ids)

    def sample(self, prompt_token_ids: list[int], max_tokens: int, **_: Any) -> Completion:
        return self.engine.sample(prompt_token_ids, max_tokens)


def _loaded(directory: str | Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture
def server(model: str) -> StandIn:
    torch.manual_seed(0)
    return StandIn(model)


def weights_of(
    server: StandIn, root: Path, lora: LoraOptions | None = None, **options: Any
) -> SglangWeights:
    return SglangWeights(
        server=server,  # type: ignore[arg-type]
        weights=TrainedWeights(server.model, lora),
        directories=VersionDirectories(root),
        device="cpu",
        last_step=5,
        **{"dtype": "auto", "every_steps": 1} | options,
    )


def begun(sync: SglangWeights, step: int = 0, last_epoch: int = 0) -> MasterOptimizer:
    optimizer = optimizer_of(sync.load_policy())
    sync.start(optimizer, step, last_epoch)
    return optimizer


def take_steps(sync: SglangWeights, optimizer: MasterOptimizer, steps: range) -> list[bool]:
    served = []
    for step in steps:
        gather_gradient(sync._policy, seed=step)
        optimizer.step(step)
        done = sync.publish(optimizer, step + 1)
        assert done.version.step == step + 1
        assert (done.alignment is not None) == done.is_served == (done.seconds > 0)
        served.append(done.is_served)
    return served


def test_weights_are_published_at_the_start_when_due_and_at_the_end(
    server: StandIn, tmp_path: Path
) -> None:
    sync = weights_of(server, tmp_path / "weights", every_steps=2)
    optimizer = begun(sync)
    assert (sync.begun_as, server.loaded) == (None, [(1, 0)])
    assert take_steps(sync, optimizer, range(5)) == [False, True, False, True, True]
    assert server.loaded == [(1, 0), (1, 2), (1, 4), (1, 5)]
    assert names(tmp_path / "weights") == ["1-4", "1-5"]


@pytest.mark.full
def test_a_run_publishes_its_own_weights_in_a_new_epoch(server: StandIn, tmp_path: Path) -> None:
    first = weights_of(server, tmp_path / "first")
    take_steps(first, begun(first), range(2))
    untrained = weights_of(server, tmp_path / "second")
    begun(untrained)
    assert server.loaded[-1] == (2, 0)
    server.restart()  # so the epochs are those of the directories and of the checkpoint
    begun(weights_of(server, tmp_path / "second"))
    assert server.loaded[-1] == (3, 0)
    begun(weights_of(server, tmp_path / "third"), step=4, last_epoch=7)
    assert server.loaded[-1] == (8, 4)


def test_a_server_that_does_not_serve_what_it_names_is_found(
    server: StandIn, tmp_path: Path
) -> None:
    sync = weights_of(server, tmp_path)
    optimizer = begun(sync)
    take_steps(sync, optimizer, range(1))
    server.ignores = True
    with pytest.raises(ServedWeightsDiffer, match="still serves the weights of the previous"):
        take_steps(sync, optimizer, range(1, 2))


def test_a_restarted_server_gets_the_weights_again_and_other_weights_are_found(
    server: StandIn, tmp_path: Path
) -> None:
    sync = weights_of(server, tmp_path / "first")
    take_steps(sync, begun(sync), range(2))
    sync.recover_server()
    server.restart()
    sync.recover_server()
    assert server.loaded == [(1, 0), (1, 1), (1, 2), (1, 2)]
    server.engine.swap(_loaded(server.model), PolicyVersion(1, 2))
    with pytest.raises(ServedWeightsDiffer, match="Since the publication"):
        sync.recover_server()
    begun(weights_of(server, tmp_path / "another run"))
    with pytest.raises(ServedWeightsDiffer, match=r"serves policy version 2\.0, .* 1\.2"):
        sync.recover_server()


def test_adapters_and_another_data_type_are_refused(server: StandIn, tmp_path: Path) -> None:
    with pytest.raises(ServerUnsuitable, match="train the whole model"):
        weights_of(server, tmp_path, lora=LORA).load_policy()
    server.dtype = "half"
    with pytest.raises(PolicyMismatch, match=r"model\.dtype=float16"):
        weights_of(server, tmp_path, dtype="float32").load_policy()
    server.dtype = "auto"
    with pytest.raises(PolicyMismatch, match="--dtype bfloat16"):
        weights_of(server, tmp_path).load_policy()
    begun(weights_of(server, tmp_path, dtype="float32"))
