"""Flags of server and trainer in each weight-sync mode."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_core.settings import load_settings
from grpo_local.modes import HandOff
from grpo_local.settings import DemoSettings

OF_FILES = {"--no-share-weights", "--weights-dir"}
TAKES_ADAPTERS = OF_FILES | {"--enable-lora", "--max-loras", "--max-lora-rank"}
TRAINS_ADAPTERS = {
    *("--run-id", "--lora-r", "--lora-alpha", "--lora-dropout", "--lora-target-modules"),
}


def hand_off(*argv: str) -> HandOff:
    return HandOff(
        options=load_settings(DemoSettings, argv),
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
        (
            "shared_vllm",
            {"--share-weights", "--weights-socket", "--bridge-config-path"},
            {"--weights-socket"},
        ),
        ("lora_only", TAKES_ADAPTERS, TRAINS_ADAPTERS | {"--adapter-sync-interval"}),
        ("lora_restart", TAKES_ADAPTERS, TRAINS_ADAPTERS | {"--vllm-restart-interval"}),
        ("none", OF_FILES, {"--run-id", "--vllm-restart-interval"}),
    ],
)
def test_each_mode_tells_server_and_trainer_what_it_needs_and_no_secret(
    mode: str, server: set[str], trainer: set[str]
) -> None:
    chosen = hand_off("--mode", mode)
    assert flags(chosen.server_flags()) == {"--run-id"} | server
    assert flags(chosen.trainer_flags()) == {"--mode", "--save-path"} | trainer
    words = chosen.server_flags() + chosen.trainer_flags()
    assert not [word for word in words if "secret" in word]
    assert chosen.environment() == {"REDIS_URL": "redis://:a-secret@127.0.0.1:1/0"}


def test_rank_cadence_and_directory_are_the_same_on_both_sides() -> None:
    chosen = hand_off("--mode", "lora_restart", "--lora-r", "20")
    server, trainer = chosen.server_flags(), chosen.trainer_flags()
    assert server[server.index("--max-lora-rank") + 1] == "32"
    assert trainer[trainer.index("--lora-r") + 1] == "20"
    assert trainer[trainer.index("--vllm-restart-interval") + 1] == "7"
    assert server[server.index("--weights-dir") + 1] == f"{Path.cwd()}/checkpoints/served_weights"
    assert trainer[-3:] == ["--lora-target-modules", "q_proj", "v_proj"]
