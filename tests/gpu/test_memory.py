"""Counts the copies of the weights in GPU memory, by the driver and by torch; `-s` prints them."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

import pytest
import torch

from benchmarks.gpu_bench.models import make_random_model
from grpo_trainer.model.loading import TrainedWeights
from tests.fixtures.inference import InferenceServer, start_inference, stop_inference
from tests.inference.trainer_side import AttachedTrainer, attached_trainer

MIB = 2**20
FLOAT32_BYTES = 4
LR = 1e-4


@pytest.fixture(scope="module")
def large_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceServer]:
    """Random weights in the shape of Qwen2.5-0.5B in bfloat16: 1 GB, far larger than any buffer."""
    model = make_random_model("0.5b", tmp_path_factory.mktemp("half"), torch.bfloat16)
    server = start_inference(
        model, tmp_path_factory.mktemp("large"), "--dtype", "bfloat16", "--max-model-len", "1024"
    )
    yield server
    stop_inference(server)


def used_on_device() -> int:
    """Bytes in use by all processes."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def say(what: str, **values: float) -> None:
    numbers = ", ".join(f"{name} {value / MIB:,.0f} MiB" for name, value in values.items())
    sys.stderr.write(f"\n{what}: {numbers}\n")


@contextlib.contextmanager
def measured(what: str) -> Iterator[dict[str, int]]:
    """Memory that the block adds: `allocated` by torch, in `reserved` blocks; `used` on the
    device."""
    # cuBLAS allocates its workspace at the first product.
    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
    before = _held()
    found: dict[str, int] = {}
    yield found
    after = _held()
    found.update({name: after[name] - before[name] for name in after})
    say(what, **found)


def _held() -> dict[str, int]:
    gc.collect()
    torch.cuda.empty_cache()
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "used": used_on_device(),
    }


def weight_bytes(trainer: AttachedTrainer) -> int:
    return sum(p.nbytes for p in trainer.policy.parameters())


def test_attaching_costs_no_copy_of_the_weights(large_server: InferenceServer) -> None:
    with contextlib.ExitStack() as stack:
        with measured("trainer attached, with its masters") as added:
            trainer = stack.enter_context(attached_trainer(large_server, lr=LR))
        size = weight_bytes(trainer)
        elements = size // 2
        masters = FLOAT32_BYTES * elements
        # `attached_trainer` keeps the values that it found, to restore them at the end.
        kept = masters
        say("expected", weights=size, masters=masters, kept=kept)
        assert added["allocated"] == pytest.approx(masters + kept, rel=0.02)
        assert added["used"] - added["reserved"] < 0.3 * size


def test_a_copy_would_be_seen(large_server: InferenceServer) -> None:
    """The negative control: the measurement detects a copy."""
    with measured("a model of one's own") as added:
        own = TrainedWeights(str(large_server.model)).load(torch.bfloat16, torch.device("cuda", 0))
    size = sum(p.nbytes for p in own.parameters())
    assert added["allocated"] == pytest.approx(size, rel=0.02)


def test_a_step_adds_moments_and_gradients_and_nothing_else(large_server: InferenceServer) -> None:
    with attached_trainer(large_server, lr=LR) as trainer:
        size = weight_bytes(trainer)
        trainer.step(0)  # cuBLAS allocates its workspace once
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trainer.gather_gradient(1)
        gathered = torch.cuda.memory_allocated() - before
        trainer.optimizer.step(1)
        trainer.sync.publish(trainer.optimizer, 2)
        after = torch.cuda.memory_allocated() - before
        peak = torch.cuda.max_memory_allocated() - before
        say("second step", weights=size, gathered=gathered, kept_after=after, peak=peak)
        assert gathered == pytest.approx(size, rel=0.05)  # the first gradient stays bfloat16
        assert after < 0.02 * size
        assert trainer.alignment().mean < 0.05


def test_memory_comes_back_when_the_trainer_leaves(large_server: InferenceServer) -> None:
    with measured("after a trainer that came and went") as added, attached_trainer(large_server):
        pass
    assert added["allocated"] < MIB


def test_the_server_loads_the_weights_once(large_server: InferenceServer) -> None:
    """The count that vLLM reports."""
    lines = large_server.process.log_path.read_text().splitlines()
    (line,) = (line for line in lines if "Model loading took" in line)
    said = line.split("Model loading took")[1]
    sys.stderr.write(f"\nvLLM: model loading took{said}\n")
    size = sum(file.stat().st_size for file in large_server.model.glob("*.safetensors"))
    assert float(said.split()[0]) * 2**30 < 1.3 * size + 64 * MIB
