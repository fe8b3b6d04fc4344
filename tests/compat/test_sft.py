"""`grpo-sft` with unmodified TRL trains the tiny model: on answers alone, and writes a model that
everything else takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_core.settings.machine import TINY
from grpo_tiny_model.model import ensure_tiny_model
from tests.compat.upstream_install import NoPackageIndex, ensure_wheel

pytestmark = pytest.mark.full

PINS = Path(__file__).parents[2] / "requirements" / "constraints.txt"
ROWS = [
    {"prompt": f"{a}+{b}=", "completion": f"<answer>{a + b}</answer>"}
    for a in range(4)
    for b in range(4)
]
DEADLINE_S = 400


@pytest.fixture(scope="module")
def trl() -> Path:
    (pin,) = (line for line in PINS.read_text().splitlines() if line.startswith("trl=="))
    try:
        return ensure_wheel(pin)
    except NoPackageIndex as error:
        pytest.skip(f"no package index: {error}")


def train(trl: Path, directory: Path, *flags: str) -> dict[str, Any]:
    """Returns what the training found out."""
    data = directory / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    command: list[str | Path] = [sys.executable, "-m", "grpo_runs", "sft", "--model", TINY]
    command += ["--data", data, "--output", directory / "sft", "--batch-size", str(len(ROWS))]
    command += flags
    path = os.pathsep.join(filter(None, (str(trl), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((directory / "sft/sft.json").read_text())
    return found


def test_the_answers_are_learned_and_the_prompts_do_not_count(trl: Path, tmp_path: Path) -> None:
    found = train(trl, tmp_path, "--epochs", "8", "--lr", "1e-3")
    first, *_, last = map(json.loads, (tmp_path / "sft/metrics.jsonl").read_text().splitlines())
    assert (first["step"], last["step"], last["steps"]) == (1, 8, 8)
    # The batch is all rows, whose loss per token of an answer was computed without TRL.
    assert first["train/loss"] == pytest.approx(found["loss_before"], rel=1e-4)
    assert found["loss_after"] < 0.7 * found["loss_before"]
    assert found["measured_examples"] == len(ROWS)


@pytest.mark.parametrize("flags", [(), ("--lora-r", "4")], ids=["whole", "adapter"])
def test_the_result_is_a_model_like_its_base(
    trl: Path, flags: tuple[str, ...], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = train(trl, tmp_path, "--epochs", "2", "--lr", "1e-3", *flags)
    assert found["loss_after"] < found["loss_before"]
    base, result = ensure_tiny_model(), tmp_path / "sft/model"
    assert {path.name for path in result.iterdir()} == {path.name for path in base.iterdir()}
    for file in ("config.json", "generation_config.json"):
        assert json.loads((result / file).read_text()) == json.loads((base / file).read_text())
    trained, before = map(AutoModelForCausalLM.from_pretrained, (result, base))
    assert trained.dtype == before.dtype
    texts = [AutoTokenizer.from_pretrained(path).chat_template for path in (result, base)]
    assert texts[0] == texts[1]
