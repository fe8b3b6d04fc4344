"""Services of an earlier commit are replaced one by one while the run trains."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from grpo_core.process import ManagedProcess
from tests.support.preloaded import MODULE as PRELOADED
from tests.whole_run.commands import (
    ENVIRONMENT,
    REDIS,
    RUN_API,
    SERVER,
    SHARED,
    STATE_INTERVAL,
    TRAINER,
    Commands,
    Shape,
)
from tests.whole_run.rig import Rig

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of the commit that made the golden run."""
    from tests.upgrade.make_golden import GOLDEN  # imports torch, which no other test here needs
    from tests.upgrade.run import FACTS

    with tarfile.open(GOLDEN) as packed:
        facts = packed.extractfile(FACTS)
        assert facts is not None
        commit = json.load(facts)["commit"]
    tree = tmp_path_factory.mktemp("earlier")
    packed_tree = tree / "tree.tar"
    command = ["git", "archive", "--output", str(packed_tree), commit]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no commit {commit} in this clone: {done.stderr.strip()}")
    with tarfile.open(packed_tree) as archive:
        archive.extractall(tree, filter="data")
    return tree


class CommandsOfBoth(Commands):
    """Those that both releases understand."""

    def of(self, name: str) -> list[str]:
        words = super().of(name)
        if PRELOADED in words:  # a server of the earlier commit is not forked from this one
            at = words.index(PRELOADED)
            words[at : at + 2] = ["grpo_vllm"]
        if "--server-name" in words:
            at = words.index("--server-name")
            del words[at : at + 2]
        ours = {"staged_trainer": "grpo_trainer", "journalled_environment": "grpo_env"}
        return [ours.get(word.removeprefix("tests.whole_run."), word) for word in words]


class RigOfBoth(Rig):
    """Args: tree: of the earlier commit, which all services have until `replace`"""

    def __init__(self, commands: CommandsOfBoth, tree: Path) -> None:
        super().__init__(commands)
        packages = [*tree.glob("services/*/src"), tree / "shared/src"]
        packages = packages if packages[0].exists() else [*tree.glob("services/*"), tree / "shared"]
        self._path_of_earlier = os.pathsep.join(map(str, packages))
        self._replaced = {REDIS}

    def launch(self, name: str, *flags: str) -> ManagedProcess:
        with pytest.MonkeyPatch.context() as patch:
            if name not in self._replaced:
                patch.setenv("PYTHONPATH", self._path_of_earlier)
            return super().launch(name, *flags)

    def replace(self, *names: str) -> None:
        for name in names:
            self._processes[name].stop()
        self._replaced |= {*names}
        self.start(*names)


@pytest.mark.parametrize(
    ("mode", "order"),
    [
        (SHARED, [(RUN_API,), (ENVIRONMENT,), (TRAINER,), (SERVER,)]),
        ("none", [(RUN_API,), (ENVIRONMENT,), (TRAINER, SERVER)]),
    ],
)
def test_services_are_replaced_while_the_run_trains(
    mode: str,
    order: list[tuple[str, ...]],
    earlier: Path,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    with RigOfBoth(CommandsOfBoth(tmp_path, tiny_model, Shape(mode)), earlier) as rig:
        rig.start(REDIS, RUN_API, SERVER, TRAINER, ENVIRONMENT)
        rig.wait_for_steps(STATE_INTERVAL)
        for names in order:
            rig.replace(*names)
            rig.wait_for_steps(STATE_INTERVAL + 1)
        steps = [record["step"] for record in rig.records()]
    assert steps == list(range(1, len(steps) + 1))
