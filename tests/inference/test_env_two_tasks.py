"""Two environments, each a process with its own task, feed one trainer from one server."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import httpx

from grpo_core.run_api_client import TrainerClient
from grpo_core.wire import RolloutFacts
from tests.fixtures.environment import (
    BATCH_DEADLINE_S,
    EXIT_DEADLINE_S,
    environment,
    register_trainer,
)
from tests.fixtures.inference import InferenceServer
from tests.support.wait import wait_for

STEPS = 6
SHARE = "0.25"
"""Of a batch of 8 sequences: one group of 2."""


def write_problems(directory: Path) -> Path:
    """Short ones for the session's server, and one that is too long for it."""
    rows = [{"question": f"Tom has {n} eggs. How many?", "answer": f"#### {n}"} for n in range(30)]
    rows.append({"question": "Tom has an egg. " * 100, "answer": "#### 100"})
    directory.mkdir()
    (directory / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return directory


def known_environments(api: str) -> dict[int, str]:
    """Names by env_id."""
    known = httpx.get(f"{api}/environments").raise_for_status().json()
    return {entry["env_id"]: entry["name"] for entry in known}


def test_both_contribute_to_every_batch(
    clean_run_api: str, shared_server: InferenceServer, tmp_path: Path
) -> None:
    data = write_problems(tmp_path / "data")
    flags = {task: ["--env.max-token-length", "400"] for task in ("arithmetic", "gsm8k")}
    for words in flags.values():
        words += ["--env.min-batch-allocation", SHARE]
    flags["gsm8k"] += ["--env.data", str(data), "--env.max-completion-tokens", "24"]
    with TrainerClient(clean_run_api) as trainer, ExitStack() as stack:
        register_trainer(trainer, num_steps=STEPS)
        processes = [
            stack.enter_context(
                environment(
                    task,
                    clean_run_api,
                    shared_server.url,
                    shared_server.model,
                    tmp_path / f"{task}.log",
                    *words,
                )
            )
            for task, words in flags.items()
        ]
        # Before both are there, batches hold what the one sends.
        names = wait_for(lambda: known_environments(clean_run_api), lambda known: len(known) == 2)
        batches = [trainer.next_batch(BATCH_DEADLINE_S).groups for _ in range(STEPS)]
        assert [process.wait(EXIT_DEADLINE_S) for process in processes] == [0, 0]

    assert sorted(names.values()) == ["arithmetic_0", "gsm8k_0"]
    # The first batches may come from before the second one was known.
    senders = [
        {names[group.env_id] for group in batch if group.env_id is not None} for batch in batches
    ]
    assert senders[-3:] == [{"arithmetic_0", "gsm8k_0"}] * 3
    log = (tmp_path / "gsm8k.log").read_text()
    assert "kept=30" in log
    assert "too_long=1" in log
    for group in batches[-1]:
        facts = RolloutFacts.of(group)
        assert len(facts.policy_version) == group.size == 2
        question = (group.messages or [[]])[0][0]["content"]
        is_gsm8k = names[group.env_id or 0] == "gsm8k_0"
        assert question.startswith("Reason step by step") is is_gsm8k
