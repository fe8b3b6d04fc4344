"""The plan of `grpo --memory-plan` says what fits, and depends on the options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Gemma3nTextConfig, Gemma4TextConfig, LlamaConfig

from grpo_core.tree.trainer_command import CommandLine
from grpo_trainer.memory_plan import GIB, MemoryPlan, memory_plan, text_of

WIDTH = 100


@pytest.fixture(scope="module")
def eight_billion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of Llama 3.1 8B, without weights."""
    directory = tmp_path_factory.mktemp("8b")
    LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(directory)
    return directory


def plan(model: Path, **options: object) -> MemoryPlan:
    chosen = {"model": str(model), "mode": "shared_vllm", "device": "cuda", **options}
    line = CommandLine.model_validate(chosen)
    return memory_plan(line.settings(), line.processes)


SMALL = {"optimizer": "adafactor", "master_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "trainer 105.1 GiB + server 36.0 GiB of 80.0 GiB\nThey do not fit. Smaller: "),
        (SMALL, "They fit with --gradient-checkpointing --gpu-memory-utilization 0.35\n"),
        ({"mode": "lora_only"}, "They fit\n"),
    ],
)
def test_the_plan_of_8_billion_weights_says_what_fits_on_80_gib(
    options: dict[str, str], told: str, eight_billion: Path
) -> None:
    """Adafactor with bfloat16 master weights needs 2 + 4 bytes per weight: 44.9 GiB."""
    found = plan(eight_billion, **options)
    out = text_of(found)
    assert max(map(len, out.splitlines()[1:])) <= WIDTH
    assert "GPU      80.0 GiB (no GPU found, so this size is assumed)" in out
    assert told in out
    if not options:
        for line in (
            "29.9  master weights, float32, 4.00 bytes per weight",
            "29.9  gradients, 4.00 bytes per weight",
            "15.2  moments of adamw_8bit, 2.03 bytes per weight",
            "0.0  copies of the model",
        ):
            assert line in out
    for recomputes in (False, True):
        if (usable := found.usable_utilization(recomputes)) is not None:
            server = usable * found.machine.total_bytes
            assert server + found.trainer_bytes(recomputes) <= found.machine.total_bytes
            assert server >= found.least_server_bytes


def test_the_plan_of_several_ranks_is_that_of_each(eight_billion: Path) -> None:
    """On a GPU of its own; 4 ranks divide the 105 GiB less activations that one needs, and the
    model's 15 GiB. On a CPU all are in the memory of the host."""
    options = {"mode": "none", "ranks": 4, "fsdp": True, "optimizer": "adamw"}
    one = plan(eight_billion, mode="none", optimizer="adamw").kept.total
    found = plan(eight_billion, **options)
    assert found.kept.total == pytest.approx(one / 4)
    out = text_of(found)
    assert "GiB for each of 4 ranks" in out
    assert "or more, on another GPU" in out
    assert "They fit\n" in out
    host = replace(found, machine=replace(found.machine, is_gpu=False))
    assert host.ranks_beside == 4
    assert host.usable_utilization(False) is None


def test_layers_passes_and_copies_change_their_part_alone(eight_billion: Path) -> None:
    several = plan(eight_billion)
    one_pass = plan(eight_billion, gradient_accumulation_steps=1)
    assert 2 * one_pass.kept.gradients == several.kept.gradients
    assert one_pass.kept.moments == several.kept.moments
    copied = plan(eight_billion, mode="none")
    assert replace(copied.kept, weights=0) == several.kept
    assert copied.kept.weights == several.weights_bytes
    some = plan(eight_billion, train_layer_indices="24-31")
    assert some.kept.masters < several.kept.masters / 4
    assert some.working_bytes < several.working_bytes


def test_on_a_cpu_the_plan_takes_the_memory_of_this_host(eight_billion: Path) -> None:
    found = plan(eight_billion, device="cpu", tokens_per_micro_batch=512, dtype="bfloat16")
    assert found.optimizer == "adamw"
    out = text_of(found)
    assert "GPU" not in out
    assert f"memory   {found.machine.total_bytes / GIB:.1f} GiB of this host" in out
    assert "buffers of 512 tokens" in out
    assert "--gpu-memory-utilization" not in out
    fits = found.trainer_bytes(False) + found.least_server_bytes <= found.machine.total_bytes
    assert (found.usable_utilization(False) is not None) == fits


def test_the_plan_counts_the_keys_of_each_layer_if_their_sizes_differ(tmp_path: Path) -> None:
    """Gemma 4: five of six layers have heads of 256, the sixth of 512."""
    Gemma4TextConfig(num_hidden_layers=6, num_key_value_heads=4, dtype="bfloat16").save_pretrained(
        tmp_path
    )
    found = plan(tmp_path, max_model_len=1)
    assert found.kv_bytes == 2 * 4 * (5 * 256 + 512) * 2


def test_the_plan_counts_the_widest_mlp_if_each_layer_has_its_own(tmp_path: Path) -> None:
    """Gemma 3n: a list of widths."""

    def working_bytes(*widths: int) -> tuple[int, int]:
        Gemma3nTextConfig(
            num_hidden_layers=2, intermediate_size=[*widths], num_kv_shared_layers=0
        ).save_pretrained(tmp_path)
        return plan(tmp_path).working_bytes

    assert working_bytes(64, 8192) == working_bytes(8192, 64) > working_bytes(64, 64)
