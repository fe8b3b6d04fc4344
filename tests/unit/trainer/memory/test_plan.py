"""The plan of `grpo --memory-plan` names what fits, and depends on the options."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from grpo_trainer.config.cli import CommandLine
from grpo_trainer.memory.plan import GIB, MemoryPlan, memory_plan
from grpo_trainer.memory.table import text_of

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
    redis_url = "redis://127.0.0.1:6379/0"
    chosen = {"model": str(model), "mode": "shared_vllm", "redis_url": redis_url}
    chosen |= {"device": "cuda", **options}
    return memory_plan(CommandLine.model_validate(chosen))


def test_a_whole_model_of_8_billion_weights_fits_on_80_gib_and_the_plan_says_how(
    eight_billion: Path,
) -> None:
    """Adafactor with bfloat16 master weights needs 2 + 4 bytes per weight: 44.9 GiB."""
    out = text_of(plan(eight_billion))
    assert max(map(len, out.splitlines()[5:])) <= WIDTH
    assert "44.9" in out
    (chosen,) = (line.split() for line in out.splitlines() if line.startswith(">"))
    assert chosen[1:5] == ["shared_vllm", "all", "adamw_8bit", "float32"]
    assert chosen[5:9] == ["4.00", "4.00", "2.03", "0.00"]
    assert "GPU      80.0 GiB (no GPU found, so this size is assumed)" in out
    assert out.endswith(
        "They do not fit.\n"
        "The whole model fits, for example, with --mode shared_vllm --optimizer adafactor\n"
        "--master-dtype bfloat16 --gpu-memory-utilization 0.35 --gradient-checkpointing\n"
    )


def test_what_the_plan_calls_fitting_leaves_room_for_the_server(eight_billion: Path) -> None:
    found = plan(eight_billion)
    fitting = 0
    for one in found.combinations:
        for is_recomputed in (False, True):
            utilization = found.usable_utilization(one, is_recomputed)
            if utilization is None:
                continue
            fitting += 1
            server = utilization * found.machine.total_bytes
            assert server + one.needed(is_recomputed) + GIB <= found.machine.total_bytes
            assert server >= found.server.least_bytes
    assert 0 < fitting < 2 * len(found.combinations)


def test_options_change_the_chosen_row_alone(eight_billion: Path) -> None:
    chosen = plan(
        eight_billion, optimizer="adafactor", mode="none", train_layer_indices="0-3,28-31"
    ).chosen
    assert (chosen.trainee.modes, chosen.trainee.layers) == ("none", "0-3,28-31")
    one_pass = plan(eight_billion, gradient_accumulation_steps=1).chosen
    several = plan(eight_billion).chosen
    assert 2 * one_pass.kept.gradients == several.kept.gradients
    assert one_pass.kept.moments == several.kept.moments


def test_on_a_cpu_the_plan_takes_the_memory_of_this_host(eight_billion: Path) -> None:
    found = plan(eight_billion, device="cpu", tokens_per_micro_batch=512, dtype="bfloat16")
    assert found.chosen.optimizer == "adamw"
    out = text_of(found)
    assert "GPU" not in out
    assert f"memory   {found.machine.total_bytes / GIB:.1f} GiB of this host" in out
    assert "for a micro-batch of 512 tokens" in out
    assert "--gpu-memory-utilization" not in out
    needed = found.chosen.needed(False) + found.machine.trainer_reserve
    fits = needed + found.server.least_bytes <= found.machine.total_bytes
    assert (found.usable_utilization(found.chosen, False) is not None) == fits
