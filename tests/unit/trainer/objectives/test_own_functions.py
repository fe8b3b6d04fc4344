"""The user's own loss and advantages, by path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from grpo_core.tree.trainer import TrainerSettings
from grpo_core.tree.trainer_command import CommandLine
from grpo_runs.__main__ import run as grpo_run
from grpo_trainer.__main__ import main as grpo
from grpo_trainer.advantages import group_advantages
from grpo_trainer.checks.self_test import require_own_functions
from grpo_trainer.errors import FunctionUnusable
from grpo_trainer.losses import policy_loss
from grpo_trainer.telemetry.provenance import code_of
from tests.unit.conftest import Mistake
from tests.unit.trainer.groups import good, inputs_of, micro_of

OWN = """
def squared(tokens, objective):
    surrogate = tokens.ratio.square() * tokens.advantages
    return -(tokens.weight * surrogate).sum()

def doubled(groups):
    return [2 * (scores - scores.mean()) for scores in groups]
"""
LOSS = "def own(tokens, objective):\n    return "
ADVANTAGE = "def own(groups):\n    return "


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "my.py").write_text(OWN)
    return str(tmp_path / "my.py")


def settings(**options: object) -> TrainerSettings:
    given = {"model": "m", "mode": "shared_vllm", **options}
    return CommandLine.model_validate(given).settings()


def test_they_take_the_place_of_the_named_ones(own: str) -> None:
    objective = settings(loss=f"{own}:squared", advantage=f"{own}:doubled").resolved_objective
    require_own_functions(objective)
    columns = (torch.tensor([[-1.0]]), torch.tensor([[3.0]]), torch.tensor([[0.5]]))
    logp = torch.tensor([[-1.0]]) + torch.tensor(2.0).log()
    inputs = inputs_of(logp, micro_of(*columns), objective)
    assert float(policy_loss(inputs, objective)) == pytest.approx(-0.5 * 4 * 3)
    (found,) = group_advantages([good(0, scores=[0.0, 1.0])], objective)
    assert found.tolist() == [-1.0, 1.0]


@pytest.mark.parametrize(
    ("option", "code", "problem"),
    [
        ("loss", LOSS + "tokens.weight", "expected a scalar tensor"),
        ("loss", LOSS + "tokens.weight.sum()", "has no gradient"),
        ("loss", LOSS + "(tokens.logp / 0).sum()", "the loss is -inf"),
        ("loss", LOSS + "0 * tokens.logp.sum()", "is missing, 0, NaN"),
        ("loss", LOSS + "tokens.logp.sum()", "whose weight is 0 have a gradient"),
        (
            "loss",
            LOSS + "(tokens.weight * tokens.ratio).mean()",
            "of micro-batches of one sequence",
        ),
        ("loss", LOSS + "tokens.nothing", r"own failed: \S+/my\.py line 2: AttributeError"),
        ("loss", LOSS + "__import__('json').loads('')", r"my\.py line 2: JSONDecodeError"),
        ("loss", "def other(tokens, objective): pass", "no function own"),
        ("loss", "\nimport nothing_of_that_name", r"my\.py line 2: ModuleNotFoundError"),
        ("advantage", ADVANTAGE + "groups[:1]", "as many advantages as the group has"),
        ("advantage", ADVANTAGE + "[scores / 0 for scores in groups]", "is NaN or infinite"),
    ],
)
def test_what_is_wrong_with_them_is_named(
    option: str, code: str, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "my.py").write_text(code + "\n")
    objective = settings(**{option: f"{tmp_path}/my.py:own"}).resolved_objective
    with pytest.raises(FunctionUnusable, match=problem) as caught:
        require_own_functions(objective)
    assert str(caught.value).startswith(f"--{option} ")


@pytest.mark.parametrize("command", [grpo_run, grpo])
def test_they_are_checked_before_anything_starts(
    command: Callable[[], None], mistake: Mistake, tmp_path: Path
) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "my.py").write_text("def mine(tokens, objective):\n    return (tokens\n")
    told = mistake(command, f"--model {tmp_path} --loss {tmp_path}/my.py:mine --dry-run")
    assert told.endswith(f": --loss: {tmp_path}/my.py line 2: '(' was never closed\n")
    (tmp_path / "my.py").write_text("def mine(groups):\n    return groups\n")
    told = mistake(command, f"--model {tmp_path} --advantage {tmp_path}/my.py:other --dry-run")
    assert told.endswith(f": --advantage: {tmp_path}/my.py has no 'other'; it defines mine\n")


STATEFUL = """
seen = []

def advantage(groups):
    seen.append(len(groups))
    return groups

def loss(tokens, objective):
    return -len(seen) * (tokens.weight * tokens.ratio).sum()
"""


def test_functions_of_one_file_share_its_state(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(STATEFUL)
    own = {name: f"{tmp_path}/my.py:{name}" for name in ("advantage", "loss")}
    require_own_functions(settings(**own).resolved_objective)  # a loss of 0 has no gradient


def test_each_run_of_a_process_loads_them_and_the_modules_beside_them_anew(tmp_path: Path) -> None:
    (tmp_path / "beside_own.py").write_text("left = [1]\n")
    (tmp_path / "my.py").write_text(
        "import beside_own\nleft = [1]\n"
        "def own(groups):\n    left.pop() + beside_own.left.pop()\n    return groups\n"
    )
    objective = settings(advantage=f"{tmp_path}/my.py:own").resolved_objective
    require_own_functions(objective)
    require_own_functions(objective)


def test_provenance_names_the_modules_that_they_import(tmp_path: Path) -> None:
    for name in ("my.py", "own_helper.py", "own_package/part.py", "unused.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("def own(groups): ...\n")
    (tmp_path / "my.py").write_text("import math, own_helper, own_package.part\n" + ADVANTAGE + "1")
    own = code_of(settings(advantage=f"{tmp_path}/my.py:own")).own
    names = [str(Path(path).relative_to(tmp_path)) for path in own]
    assert names == ["my.py", "own_helper.py", "own_package/part.py"]


def test_a_loss_of_the_wrong_sign_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(
        LOSS + "(tokens.weight * tokens.ratio * tokens.advantages).sum()\n"
    )
    with capture_logs() as logs:
        require_own_functions(settings(loss=f"{tmp_path}/my.py:own").resolved_objective)
    assert [entry["event"] for entry in logs] == ["loss.sign"]


def test_a_name_that_is_neither_known_nor_a_path_is_a_mistake() -> None:
    with pytest.raises(ValueError, match=r"expected clip, cispo.* or FILE\.py:FUNCTION"):
        settings(loss="clop")
