"""Files that one part of the system leaves for another: damaged ones are named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.__main__ import main as run_api
from grpo_core.errors import GrpoError
from grpo_core.evaluation.results import read_summaries
from grpo_core.weights.bridge_config import BridgeConfig, read_bridge_config
from grpo_core.weights.directory_checks import ADAPTER_CONFIG, require_servable_adapter
from grpo_core.weights.shared_memory import ParameterMapping
from grpo_core.wire.scored_group import ScoredGroup
from grpo_env.__main__ import main as env_server
from grpo_env.tasks.curriculum_files import STATE_FILE, CurriculumFiles
from grpo_env.tasks.item_stream import ItemStream
from grpo_runs.__main__ import compare
from grpo_runs.__main__ import main as demo
from grpo_runs.__main__ import run as grpo_run
from grpo_runs.offline.run_files import RunFiles, resumed_keys
from grpo_runs.offline.sweep import Job, read_jobs, write_job
from grpo_runs.recipe.keys import read_recipe
from grpo_runs.recipe.translation import translate
from grpo_runs.report.evaluations import EvaluationsFile
from grpo_trainer.__main__ import main as trainer
from grpo_trainer.data.quarantine import Quarantine
from grpo_vllm.__main__ import main as vllm_api_server
from tests.support.damage import damaged, damages
from tests.unit.bad_input.commands import nothing_left, told
from tests.unit.env.tasks.test_curriculum import items
from tests.unit.runs.records import evaluation
from tests.unit.trainer.groups import good

EXAMPLES = settings.default.max_examples // 5
RECIPE = Path(__file__).parents[3] / "recipes" / "tiny" / "grpo" / "config.yaml"
MAPPING: dict[str, Any] = {
    **{"offset": 0, "nbytes": 8, "shape": (2,), "dtype": "float32"},
    **{"vllm_name": "w", "slice": None},
}
BRIDGE = BridgeConfig(
    model="m",
    dtype="float32",
    generation="g",
    weights_socket=Path("/run/weights.sock"),
    total_bytes=8,
    device="cpu",
    param_mappings={"w": ParameterMapping(**MAPPING)},
)
GROUP: ScoredGroup = good(1)


def stream() -> ItemStream:
    return ItemStream([(items(2), 1.0)], seed=0, rule=lambda found, _: [1.0 for _ in found])


def saved_curriculum(path: Path) -> None:
    CurriculumFiles(path.parent, stream()).save(3)


Case = tuple[str, Callable[[Path], object], Callable[[Path], object]]
"""Path of the file, what writes it, and what reads it."""
CASES: dict[str, Case] = {
    "job of a sweep": (
        *("sweep/0/job.json", lambda at: write_job(at.parent, Job("0", {"lr": 1.0}, 0.5))),
        lambda at: read_jobs(at.parents[1]),
    ),
    "rollouts of an iteration": (
        *("sampled/iter_000.jsonl", lambda at: RunFiles(at.parents[1]).write_groups(0, [GROUP])),
        lambda at: RunFiles(at.parents[1]).read_groups(0),
    ),
    "keys of a run": (
        *("keys.yaml", lambda at: at.write_text("model: {train_id: m}\nseed: 1\n")),
        lambda at: resumed_keys(at.parent),
    ),
    "evaluations": (
        *("eval.jsonl", lambda at: at.write_text(f"{evaluation(1, 0.5).model_dump_json()}\n")),
        lambda at: at.is_file() and (read_summaries(at), EvaluationsFile(at).read_new()),
    ),
    "quarantine": (
        "quarantine/u/batch_3.json",
        lambda at: Quarantine(at.parents[2], "u").add(3, [GROUP], 1, GrpoError("bad")),
        lambda at: Quarantine(at.parents[2], "u").holds(3, [GROUP]),
    ),
    "curriculum": (
        *(STATE_FILE, saved_curriculum),
        lambda at: CurriculumFiles(at.parent, stream()).restore(),
    ),
    "adapter": (
        *(ADAPTER_CONFIG, lambda at: at.write_text('{"r": 8, "target_modules": ["q_proj"]}')),
        lambda at: require_servable_adapter(at.parent, 64),
    ),
    "bridge": (
        *("bridge.json", lambda at: at.write_text(BRIDGE.model_dump_json())),
        read_bridge_config,
    ),
    "recipe": (
        *("recipe.yaml", lambda at: at.write_text(RECIPE.read_text())),
        lambda at: translate(read_recipe(["--config", str(at)], "grpo"), lambda *_: 100, 1),
    ),
}


def problem_of(read: Callable[[Path], object], path: Path) -> str | None:
    try:
        read(path)
    except GrpoError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_record_is_refused_in_words(name: str, tmp_path: Path) -> None:
    place, write, read = CASES[name]
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path)
    assert problem_of(read, path) is None

    @settings(max_examples=EXAMPLES)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        with damaged(path, data.draw(damages(path))), nothing_left(tmp_path):
            problem = problem_of(read, path)
        assert problem is None or problem.strip()

    check()


OPTIONS: Mapping[str, tuple[Callable[[], None], Mapping[str, Any], str]] = {
    "grpo-run": (
        grpo_run,
        {"model": "m", "weights": {"mode": "none"}, "optim": {"lr": 1e-5, "steps": 3}},
        "{file} --dry-run",
    ),
    "grpo-demo": (
        demo,
        {"steps": 3, "task": ["arithmetic"], "seed": 3},
        "--config {file} --dry-run",
    ),
    "grpo-compare": (compare, {"steps": 3, "modes": ["none"]}, "{file} --dry-run"),
    "grpo": (
        trainer,
        {"model": "m", "mode": "lora_only", "lr": 1e-5, "lora-target-modules": ["q_proj"]},
        "--config {file} --dry-run",
    ),
    "env-server": (
        env_server,
        {"model": "m", "seq-len": 64, "columns": {"prompt": "q"}, "env": {"group-size": 4}},
        "arithmetic serve --config {file} --dry-run",
    ),
    "run-api": (
        run_api,
        {"port": 8123, "redis-url": "redis://h", "allowed-hosts": "a"},
        "--config {file} --dry-run",
    ),
    "vllm-api-server": (
        vllm_api_server,
        {"model": "m", "share-weights": True, "max-lora-rank": 8},
        "--config {file} --dry-run",
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_damaged_file_of_options_ends_a_command_in_words(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not its variable, which the library reads when it is loaded.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    main, content, words = OPTIONS[name]
    path = tmp_path / "options.yaml"
    path.write_text(yaml.safe_dump(content))
    line = words.format(file=path).split()
    assert told(main, line).status == 0

    @settings(max_examples=EXAMPLES // 4)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        with damaged(path, data.draw(damages(path))), nothing_left(tmp_path):
            found = told(main, line)
        assert not found.status or path.name in found.err or "--" in found.err, found.err

    check()
