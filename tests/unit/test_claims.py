"""What README, the first page and the reference claim is so: modes, states, machines, numbers."""

from __future__ import annotations

import re
import tomllib
from enum import StrEnum
from pathlib import Path

import pytest

from docs.generate import home
from grpo_core.tree.weights import CheckpointRestartSettings
from grpo_core.weights.servers import EngineState, ServerState
from grpo_runs.modes import MODES
from grpo_runs.settings.run import DemoSettings

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def page(name: str) -> str:
    return (ROOT / name).read_text()


def words(text: str) -> str:
    """Without line breaks and links."""
    return " ".join(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).split())


def mode_rows(text: str) -> list[list[str]]:
    """The rows of the table of modes, by cell."""
    found = re.findall(rf"(?m)^\| (`(?:{'|'.join(MODES)})` \| .*) \|$", text)
    return [words(row).split(" | ") for row in found]


def test_the_table_of_modes_is_that_of_the_explanation_and_of_the_code() -> None:
    rows = mode_rows(README)
    explained = mode_rows(page("docs/explanation/weight-sync.md"))
    assert [row for row in rows if row not in explained] == []
    assert [name.strip("`") for name, *_ in rows] == list(MODES)
    for mode, (_, trains, how, *_) in zip(MODES.values(), rows, strict=True):
        assert (trains == "an adapter") == mode.trains_adapter
        assert ("restarts" in how) == mode.restarts_engine
        assert ("shared memory" in how) == mode.shares_memory
    assert CheckpointRestartSettings.model_fields["publish"].default == "update"
    default = DemoSettings.model_fields["mode"].default
    assert f"The default is `{default}`." in words(README)


def test_the_modes_that_have_trained_on_a_gpu_are_those_of_the_results() -> None:
    results = page("docs/contributing/benchmarks.md")
    (passed,) = re.findall(r"(?m)^\| modes \| passed in ([^;]*);", results)
    assert home.introduction() in page("docs/index.md")
    (claimed,) = re.findall(r"\| Training in (.*) \| yes \| yes \|", README)
    assert {*re.findall(r"`(\w+)`", passed)} == {*re.findall(r"`(\w+)`", claimed)} < {*MODES}


def test_the_number_of_silent_faults_is_that_of_their_table() -> None:
    faults = page("docs/reference/silent-faults.md").split("## Measured")[1].split("\n## ")[0]
    rows = re.findall(r"(?m)^\| (?!Fault|---)", faults)
    told = re.findall(r"(\d+) of \1", faults)
    (claimed,) = re.findall(r"(\d+) silent faults", words(README))
    assert len(rows) == sum(map(int, told)) == int(claimed)


def test_every_page_asks_for_the_same_machine_and_names_the_same_release() -> None:
    (needs,) = re.findall(r"You need (Linux on .*? of memory)\.", words(README))
    for name in ("docs/how-to/install.md", "docs/tutorials/first-run.md"):
        assert needs in words(page(name)), name
    least, below = re.findall(
        r"3\.(\d+)", tomllib.loads(page("pyproject.toml"))["project"]["requires-python"]
    )
    assert re.findall(r"3\.(\d+)", needs) == [str(n) for n in range(int(least), int(below))]
    assert f"**State ({page('shared/grpo_core/VERSION').strip()}).**" in README


def test_results_and_code_in_readme_are_those_of_the_pages_and_files() -> None:
    (lift,) = re.findall(r"pass@1 from (\S+ to \S+ on \d+ held-out items)", words(README))
    assert f"pass@1 {lift}" in page("docs/tutorials/own-model.md")
    blocks = re.findall(r"(?s)This is `(\S+)`:\n\n```python\n(.*?)```", README)
    assert [file for file, _ in blocks] == ["examples/sums.py"]
    for file, code in blocks:
        assert code.strip() in page(file)


def test_readme_names_every_command_and_no_other() -> None:
    scripts = {
        name
        for file in ROOT.glob("services/*/pyproject.toml")
        for name in tomllib.loads(file.read_text()).get("project", {}).get("scripts", {})
        if not name.startswith("atropos-")  # other names of grpo and grpo-run
    }
    how = README.split("## How it works")[1].split("\n## ")[0]
    assert {*re.findall(r"`(grpo|[a-z]+(?:-[a-z]+)+)`", how)} == scripts


@pytest.mark.parametrize(
    ("title", "states"),
    [("States of the engine", EngineState), ("States of the supervisor", ServerState)],
)
def test_the_reference_lists_every_state_and_no_other(title: str, states: type[StrEnum]) -> None:
    section = page("docs/reference/http-vllm-server.md").split(f"# {title}\n")[1].split("\n#")[0]
    named = re.findall(r"(?m)^\| `(\w+)` \|", section.split("|\n\n")[0])
    assert sorted(named) == sorted(["state", *states])  # the head of the table, too
