"""Rollouts from a real SGLang server on a CPU, and weights published to it.

SGLANG_PYTHON names an interpreter that has SGLang: `tests/offline/sglang_env.sh` makes one.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from grpo_core.clients.inference import Completion
from grpo_core.errors import RequestRefused
from grpo_core.process import ManagedProcess
from grpo_env.rollout.chat_template import load_template
from grpo_runs.offline.keys import OfflineKeys
from grpo_runs.offline.loop import run_offline
from grpo_runs.offline.results import train_records
from grpo_runs.offline.run_files import RunFiles
from grpo_runs.offline.screen import OfflineScreen
from grpo_runs.offline.sglang import SERVICE, SglangClient, SglangGeneration, SglangWeights
from grpo_runs.process.ports import free_port
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.weight_sync.files import WeightDirectories
from tests.support.directories import names
from tests.unit.trainer.tiny_policy import gather_gradient, optimizer_of

pytestmark = pytest.mark.offline

START_DEADLINE_S = 300.0
FLOAT32_NOISE = 1e-4
"""Bound on |served - own| logprob. Seen: 5e-6."""
ON_CPU = [
    *("--device", "cpu", "--dtype", "float32"),
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--mem-fraction-static", "0.1", "--max-total-tokens", "8192"),
    "--disable-cuda-graph",
    "--disable-overlap-schedule",
    "--skip-server-warmup",
    "--sleep-on-idle",
]
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Server:
    url: str
    model: Path


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    python = os.environ.get("SGLANG_PYTHON")
    if not python:
        pytest.skip("no SGLANG_PYTHON: tests/offline/sglang_env.sh makes an environment")
    port = free_port()
    command = [
        *(python, "-m", "sglang.launch_server", "--model-path", str(tiny_model)),
        *("--host", "127.0.0.1", "--port", str(port), *ON_CPU),
    ]
    log = tmp_path_factory.mktemp("sglang") / "sglang.log"
    process = ManagedProcess("SGLang", command, log, ENVIRONMENT)
    url = f"http://127.0.0.1:{port}"
    try:
        process.wait_until(lambda: _answers(url), START_DEADLINE_S)
        yield Server(url, tiny_model)
    finally:
        process.stop(grace_s=30.0)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/model_info", timeout=2.0).status_code == 200
    except httpx.TransportError:
        return False


@dataclass
class Trainer:
    sync: SglangWeights
    optimizer: MasterOptimizer

    def step(self) -> None:
        step = self.sync.version.step
        gather_gradient(self.sync._policy, seed=step)
        self.optimizer.step(step)
        alignment = self.sync.publish(self.optimizer, step + 1).alignment
        assert alignment is not None
        assert alignment.mean < FLOAT32_NOISE
        assert alignment.is_conclusive


@pytest.fixture
def trainer(server: Server, tmp_path: Path) -> Iterator[Trainer]:
    sync = SglangWeights(
        server=SglangClient(SERVICE, server.url, 60.0, 60.0),
        weights=TrainedWeights(str(server.model)),
        directories=WeightDirectories(tmp_path / "weights"),
        dtype="auto",
        device="cpu",
        every_steps=1,
        last_step=100,
    )
    with contextlib.closing(sync):
        optimizer = optimizer_of(sync.load_policy(), lr=1e-3)
        sync.start(optimizer, 0)
        yield Trainer(sync, optimizer)


def prompt_of(server: Server) -> list[int]:
    return load_template(str(server.model)).prompt_ids([{"role": "user", "content": "3+4="}], [])


async def sampled(server: Server, **sampling: Any) -> list[Completion]:
    async with SglangGeneration(SERVICE, server.url, 120.0, 120.0, 4) as generation:
        answer = await generation.generate(prompt_of(server), **sampling)
    return answer.completions()


def largest_difference(
    trainer: Trainer, prompt: list[int], found: list[Completion], temperature: float
) -> float:
    """|logged - own| logprob, largest over all tokens."""
    worst = 0.0
    for one in found:
        ids = torch.tensor([prompt + one.token_ids])
        with torch.no_grad():
            logits = trainer.sync._policy(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        own = (logits / temperature).log_softmax(-1)
        own = own.gather(-1, torch.tensor(one.token_ids)[:, None])[:, 0]
        worst = max(worst, float((own - torch.tensor(one.logprobs)).abs().max()))
    return worst


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("reshaping", [{}, {"top_p": 0.5}, {"top_k": 3}])
async def test_logprobs_are_those_at_the_temperature_before_top_p_and_top_k(
    server: Server, trainer: Trainer, temperature: float, reshaping: dict[str, Any]
) -> None:
    found = await sampled(
        server, n=4, max_tokens=12, temperature=temperature, ignore_eos=True, **reshaping
    )
    assert [len(one.token_ids) for one in found] == [12] * 4
    off = largest_difference(trainer, prompt_of(server), found, temperature)
    assert off < FLOAT32_NOISE
    if temperature != 1.0:
        assert largest_difference(trainer, prompt_of(server), found, 1.0) > 100 * FLOAT32_NOISE


async def test_completions_end_at_an_end_token_at_a_text_or_at_the_limit(
    server: Server, trainer: Trainer
) -> None:
    [greedy] = await sampled(server, max_tokens=8, temperature=0.0)
    assert (greedy.finish_reason, len(greedy.token_ids)) == ("stop", len(greedy.text) + 1)
    [at_text] = await sampled(server, max_tokens=8, temperature=0.0, stop=[greedy.text[-1]])
    assert (at_text.finish_reason, at_text.text) == ("stop", greedy.text[:-1])
    [cut] = await sampled(server, max_tokens=2, ignore_eos=True)
    assert cut.finish_reason == "length"
    with pytest.raises(RequestRefused, match="longer than the model's context length"):
        trainer.sync.served_logprobs([20] * 3000)


async def test_each_publication_is_served_under_its_version(
    server: Server, trainer: Trainer, tmp_path: Path
) -> None:
    prompt = prompt_of(server)
    before = trainer.sync.version
    for _ in range(2):
        trainer.step()
        assert trainer.sync.server.weight_version() == trainer.sync.version
        found = await sampled(server, n=4, max_tokens=8, ignore_eos=True)
        assert {one.first_version for one in found} == {trainer.sync.version}
        assert {one.last_version for one in found} == {trainer.sync.version}
        assert largest_difference(trainer, prompt, found, 1.0) < FLOAT32_NOISE
    assert trainer.sync.version == (before.epoch, 2)
    epoch = before.epoch
    assert names(tmp_path / "weights") == [f"{epoch}-1", f"{epoch}-2"]


def test_a_whole_run_samples_from_the_newest_weights(server: Server, tmp_path: Path) -> None:
    """Three iterations of two optimizer steps; rollouts and evaluations are of the weights that
    were published last, or the run would end with StaleServer."""
    limits = {"seq_len": 64}
    model = {"train_id": str(server.model), "ref_id": str(server.model), "device": "cpu"}
    place = {"backend": "sglang_server", "base_url": server.url, "max_new_tokens": 8}
    keys = OfflineKeys.model_validate(
        {
            "model": model,
            "generation": place,
            "eval": {**place, "num_ids": 4},
            "train": {"iterations": 3, "lr": 1e-4},
            "grpo": limits,
            "env_server": limits,
        }
    )
    run_offline(keys, tmp_path, OfflineScreen())
    records = train_records(RunFiles(tmp_path))
    assert [record["served_step"] for record in records] == [0, 2, 4]
    assert [record["failed_checks"] for record in records] == [0, 0, 0]
    steps = [json.loads(line) for line in RunFiles(tmp_path).metrics.read_text().splitlines()]
    compared = [step["alignment/probe_abs_mean"] for step in steps[1::2]]
    assert max(compared) < FLOAT32_NOISE
