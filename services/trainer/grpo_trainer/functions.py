"""Finds the function of a loss or of advantages, by its name or by the path of the user's own."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from grpo_trainer.errors import FunctionUnusable


@functools.cache
def imported(path: str) -> Callable[..., Any]:
    """Args: path: MODULE:FUNCTION or FILE.py:FUNCTION

    Raises:
        FunctionUnusable: the user's file or function cannot be loaded.
    """
    place, _, name = path.rpartition(":")
    if not place.endswith(".py"):
        found: Callable[..., Any] = getattr(importlib.import_module(place), name)
        return found
    file = Path(place)
    if not file.is_file():
        raise FunctionUnusable(f"{path}: no such file, from {Path.cwd()}")
    sys.path.insert(0, str(file.parent.resolve()))  # so that it finds the modules beside it
    spec = importlib.util.spec_from_file_location(f"grpo_own_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise FunctionUnusable(f"{path}: {type(error).__name__}: {error}") from error
    own = getattr(module, name, None)
    if not callable(own):
        raise FunctionUnusable(f"{path}: the file has no function {name}")
    return own  # type: ignore[no-any-return]


def function_of(chosen: str, table: Mapping[str, str]) -> Callable[..., Any]:
    """Args: chosen: a name of the table, or FILE.py:FUNCTION. Raises as `imported`."""
    return imported(table.get(chosen, chosen))
