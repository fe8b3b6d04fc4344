from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from grpo_core.settings import load_settings
from grpo_local.mode_flags import HandOff
from grpo_local.modes import MODES, ModeName, smallest_max_lora_rank
from grpo_local.settings import DemoSettings
from grpo_local.sizes import BY_TASK, EVERY_LINEAR_LAYER, sizes_for

OF_MEMORY = {"--weights-socket"}
OF_FILES = {"--run-id"}
OF_ADAPTERS = {"--lora-r", "--lora-alpha", "--lora-dropout", "--lora-target-modules"}


def settings(*argv: str) -> DemoSettings:
    return load_settings(DemoSettings, argv)


def hand_off(*argv: str) -> HandOff:
    return HandOff(
        options=settings(*argv),
        restart_every_steps=7,
        target_modules=("q_proj", "v_proj"),
        redis_url="redis://:a-secret@127.0.0.1:1/0",
        run_id="one",
        save_path=Path("checkpoints"),
        weights_socket=Path("weights.sock"),
        bridge_config=Path("bridge.json"),
    )


def flags(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


@pytest.mark.parametrize(
    ("mode", "server", "trainer"),
    [
        ("shared_vllm", {"--share-weights", "--weights-socket", "--bridge-config-path"}, OF_MEMORY),
        (
            "lora_only",
            {"--weights-dir", "--enable-lora", "--max-loras", "--max-lora-rank"},
            OF_FILES | OF_ADAPTERS | {"--adapter-sync-interval"},
        ),
        (
            "lora_restart",
            {"--weights-dir", "--enable-lora", "--max-loras", "--max-lora-rank"},
            OF_FILES | OF_ADAPTERS | {"--vllm-restart-interval"},
        ),
        ("none", {"--weights-dir"}, OF_FILES | {"--vllm-restart-interval"}),
    ],
)
def test_each_mode_tells_server_and_trainer_what_it_needs_and_no_more(
    mode: str, server: set[str], trainer: set[str]
) -> None:
    chosen = hand_off("--mode", mode)
    assert flags(chosen.server_flags()) == {"--run-id"} | server
    assert flags(chosen.trainer_flags()) == {"--weight-bridge-mode", "--save-path"} | trainer


def test_rank_cadence_and_directory_are_the_same_on_both_sides() -> None:
    chosen = hand_off("--mode", "lora_restart", "--lora-r", "20")
    server, trainer = chosen.server_flags(), chosen.trainer_flags()
    assert server[server.index("--max-lora-rank") + 1] == "32"
    assert trainer[trainer.index("--lora-r") + 1] == "20"
    assert trainer[trainer.index("--vllm-restart-interval") + 1] == "7"
    assert server[server.index("--weights-dir") + 1] == f"{Path.cwd()}/checkpoints/served_weights"
    assert trainer[-3:] == ["--lora-target-modules", "q_proj", "v_proj"]


def test_the_password_of_redis_is_on_no_command_line() -> None:
    chosen = hand_off("--mode", "none")
    words = chosen.server_flags() + chosen.trainer_flags()
    assert not [word for word in words if "secret" in word]
    assert chosen.environment() == {"REDIS_URL": "redis://:a-secret@127.0.0.1:1/0"}


def test_modules_of_a_large_model_are_the_trainers_choice() -> None:
    silent = replace(hand_off("--mode", "lora_only"), target_modules=())
    assert "--lora-target-modules" not in silent.trainer_flags()


@pytest.mark.parametrize(
    ("rank", "allowed"), [(1, 1), (2, 8), (8, 8), (16, 16), (17, 32), (512, 512)]
)
def test_ranks_that_the_server_accepts(rank: int, allowed: int) -> None:
    assert smallest_max_lora_rank(rank) == allowed


def test_sizes_of_each_mode() -> None:
    whole = BY_TASK["arithmetic"]
    assert sizes_for(settings("--mode", "shared_vllm")) == whole
    assert sizes_for(settings("--mode", "none")) == replace(whole, steps=60, step_deadline_s=480.0)
    lora = sizes_for(settings("--mode", "lora_only"))
    assert lora == replace(whole, lr=6 * whole.lr)
    assert lora.lora_target_modules == EVERY_LINEAR_LAYER
    own = sizes_for(settings("--mode", "lora_only", "--model", "some/model", "--lr", "1e-6"))
    assert (own.lr, own.lora_target_modules) == (1e-6, ())


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("shared_vllm", "weights are written in place, every step"),
        ("lora_only", "the new adapter is loaded every 2 steps, beside the running engine"),
        ("lora_restart", "the engine restarts on the new adapter every 5 steps, which takes"),
        ("none", "the engine restarts on the new checkpoint every 5 steps, which takes"),
    ],
)
def test_what_the_user_reads_about_a_mode(mode: ModeName, said: str) -> None:
    every = MODES[mode].publish_every_steps(restart_every_steps=5, load_every_steps=2)
    assert MODES[mode].publication(every).startswith(said)
