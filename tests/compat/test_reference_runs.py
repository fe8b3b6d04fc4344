"""The sessions of the archived documents run, terminal by terminal, and train three steps.

The tiny model stands for the model that they name, a directory of the test for `/tmp`, and 3 for
the number of steps; servers do not compile. Everything else is typed as it is written, in a
directory with `example_trainer/` and `environments/`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.compat.reference_commands import ENVIRONMENT, GRPO, GRPO_RUN, SERVER, Command, commands
from tests.compat.terminals import Terminal, has_namespaces, run_session
from tests.support.preloaded import ENVIRONMENT as ON_A_CPU

COMPAT = Path(__file__).parents[2] / "scripts" / "compat"
STEPS = "3"
FULL, ADAPTER = "final_model", "final_adapter"
SESSIONS = {
    "latest lora_only": ((118, 123, 136, 153), ADAPTER),
    "latest shared_vllm": ((229, 234, 245, 261), FULL),
    "latest launcher": ((229, 245, 275), FULL),
    "middle none": ((100, 102, 109), FULL),
    "middle shared_vllm": ((121, 125, 132, 139), FULL),
    "middle lora_only": ((152, 154, 162, 169), ADAPTER),
    "early none": ((114, 121, 135, 155), FULL),
    "early shared_vllm": ((209, 220, 236, 255), FULL),
}
"""Lines of a document, and what a trainer exports at its end."""
AT_ONCE = (204, 206, 215, 227, 229, 233, 242, 255, 257, 261, 270)
"""Three modes on one host, in `middle`."""
_VALUES = {"--training-steps": STEPS}
_MODELS = {"--model", "--model-name", "--openai.model_name", "--env.tokenizer_name"}
_SMALL = {
    **ON_A_CPU,
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "WANDB_MODE": "offline",
}

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not has_namespaces(), reason="no network namespaces (unshare)"),
]


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A directory as the documents expect it."""
    for name in ("example_trainer", "environments", "atroposlib"):
        (tmp_path / name).symlink_to(COMPAT / name)
    rows = [{"question": f"What is {a} + 1?", "answer": f"#### {a + 1}"} for a in range(64)]
    (tmp_path / "gsm8k").mkdir()
    for split in ("train", "test"):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text(text)
    return tmp_path


@pytest.mark.parametrize("session", SESSIONS)
def test_a_session_trains_and_exports(session: str, desk: Path, tiny_model: Path) -> None:
    lines, exported = SESSIONS[session]
    document = session.split()[0]
    statuses = run_session([*_terminals(document, lines, desk, tiny_model)], desk)
    assert set(statuses.values()) == {0}, _ends(desk)
    _require_trained(desk, exported, sessions=1)


def test_three_modes_train_side_by_side(desk: Path, tiny_model: Path) -> None:
    statuses = run_session([*_terminals("middle", AT_ONCE, desk, tiny_model)], desk)
    assert set(statuses.values()) == {0}, _ends(desk)
    assert len(statuses) == 3
    _require_trained(desk, ADAPTER, sessions=1)
    _require_trained(desk, FULL, sessions=2)


def _terminals(
    document: str, lines: tuple[int, ...], desk: Path, model: Path
) -> Iterator[Terminal]:
    typed = {command.place: command for command in commands()}
    for line in lines:
        command = typed[f"{document}:{line}"]
        environment = {name: _moved(value, desk) for name, value in command.environment.items()}
        yield Terminal(
            f"{line}-{command.command}",
            [*_words(command, desk, model)],
            {
                **_SMALL,
                **environment,
                "XDG_STATE_HOME": str(desk / "state"),
                "WANDB_DIR": str(desk),
                "WANDB_API_KEY": "0" * 40,
            },
            ends=command.command in (GRPO, GRPO_RUN),
        )


def _words(command: Command, desk: Path, model: Path) -> Iterator[str]:
    words = command.typed
    yield from [sys.executable] if words[0] == "python" else [sys.executable, "-m", "grpo_api"]
    for before, word in pairwise(words):
        if before in _MODELS:
            yield str(model)
        else:
            yield _VALUES.get(before, _moved(word, desk))
    if command.command == SERVER and "--enforce-eager" not in words:
        yield "--enforce-eager"
    if command.command == GRPO_RUN:
        yield "--server.enforce-eager"
    if command.command == GRPO and "none" in words:
        yield "--vllm-flags=--enforce-eager"
    if command.command == GRPO and "--training-steps" not in words:
        yield from ("--training-steps", STEPS)
    if command.command == ENVIRONMENT:
        yield from ("--env.data", str(desk / "gsm8k"))


def _moved(text: str, desk: Path) -> str:
    return text.replace("/tmp/", f"{desk}/")


def _require_trained(desk: Path, exported: str, sessions: int) -> None:
    states = [*desk.rglob(exported)]
    assert len(states) == sessions, _ends(desk)
    for state in states:
        saved = [path.name for path in (state.parent / "trainer_state").iterdir()]
        assert any(name.endswith(f"_step_{STEPS}") for name in saved), saved


def _ends(desk: Path) -> str:
    """The last lines of every log."""
    return "\n".join(
        f"== {log.name}\n" + "\n".join(log.read_text().splitlines()[-12:])
        for log in sorted(desk.glob("*.log"))
    )
