"""Checks the name of a task without running its code."""

from __future__ import annotations

import ast
from importlib.metadata import entry_points
from pathlib import Path

from grpo_env.config.mappings import MIXTURE

BUILT_IN = ("arithmetic", "gsm8k", "math", MIXTURE)
ENTRY_POINTS = "grpo.tasks"
DEFAULT_FUNCTION = "reward"
BRIDGE = "verifiers"


def short_name(task: str) -> str:
    """For metrics: `examples/my.py:reward` → `my`, `package.module:MyTask` → `module`."""
    source, _, attribute = task.partition(":")
    if source == BRIDGE:
        return attribute
    return Path(source).stem if source.endswith(".py") else source.rpartition(".")[2]


def problem_of(task: str) -> str | None:
    """Why there cannot be such a task; None if there may be one."""
    source, colon, attribute = task.partition(":")
    if source.endswith(".py"):
        return _problem_of_file(Path(source).expanduser(), attribute or DEFAULT_FUNCTION)
    if colon or task in BUILT_IN:
        return None
    installed = sorted(point.name for point in entry_points(group=ENTRY_POINTS))
    if task in installed:
        return None
    return (
        f"no task {task!r}; expected one of {', '.join([*BUILT_IN, *installed])}, a file such as "
        "my.py:reward, a module such as package.module:MyTask, or verifiers:ENVIRONMENT"
    )


def _problem_of_file(path: Path, attribute: str) -> str | None:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        return f"cannot read {path}: {error.strerror}"
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        return f"{path}{f' line {line}' if line else ''}: {getattr(error, 'msg', error)}"
    names = [*_defined(tree)]
    if attribute in names or "*" in names:
        return None
    return f"{path} has no {attribute!r}; it defines {', '.join(names) or 'nothing'}"


def _defined(tree: ast.Module) -> list[str]:
    """Names that the module may define; `*` if that cannot be told."""
    found: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.append(node.name)
        elif not isinstance(node, ast.Expr | ast.Import):
            found.append("*")  # an assignment, an import of names or a condition
    return found
