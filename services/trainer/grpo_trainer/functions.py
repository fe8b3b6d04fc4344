"""Loads the user's own function of a loss or of advantages, by its path."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_core.own_code import load_file, where
from grpo_trainer.errors import FunctionUnusable

_PREFIX = "grpo_own_"


@functools.cache
def _loaded(file: Path) -> ModuleType:
    """One module for each file, so that its functions share state. Args: file: resolved"""
    return load_file(file, _PREFIX + "_".join(file.with_suffix("").parts[1:]))


@functools.cache
def own_function(path: str) -> Callable[..., Any]:
    """The user's function. What it raises later is named.

    Args:
        path: FILE.py:FUNCTION

    Raises:
        FunctionUnusable: the file or the function cannot be loaded.
    """
    place, _, name = path.rpartition(":")
    file = Path(place).resolve()
    if not file.is_file():
        raise FunctionUnusable(f"{path}: no such file, from {Path.cwd()}")
    try:
        own = getattr(_loaded(file), name, None)
    except Exception as error:
        raise FunctionUnusable(f"{path}: {where(error, file)}") from error
    if not callable(own):
        raise FunctionUnusable(f"{path}: the file has no function {name}")

    def named(*arguments: Any) -> Any:
        try:
            return own(*arguments)
        except Exception as error:
            raise FunctionUnusable(
                f"{path} failed: {where(error, file)}. Correct the function, then start again"
            ) from error

    return named


def files_of(path: str) -> Iterator[Path]:
    """The file of the user's function, and the modules beside it that were imported.

    Args: path: FILE.py:FUNCTION. Raises as `own_function`."""
    own_function(path)
    file = Path(path.rpartition(":")[0])
    yield file
    for _, beside in _modules_beside(file.resolve()):
        yield file.parent / beside


def _modules_beside(file: Path) -> Iterator[tuple[str, str]]:
    """Names of the modules that were imported from the file's directory, and their files in it."""
    directory = os.path.join(file.parent, "")
    for name, module in [*sys.modules.items()]:
        found = getattr(module, "__file__", None) or ""
        beside, place = found.removeprefix(directory), name.replace(".", "/")
        if found.startswith(directory) and beside in (f"{place}.py", f"{place}/__init__.py"):
            yield name, beside


def forget_own_functions() -> None:
    """Files and the modules beside them are loaded anew, without the state of an earlier run of
    this process."""
    for own, module in [*sys.modules.items()]:
        if own.startswith(_PREFIX) and module.__file__:
            for name, _ in _modules_beside(Path(module.__file__)):
                del sys.modules[name]
            del sys.modules[own]
    _loaded.cache_clear()
    own_function.cache_clear()
