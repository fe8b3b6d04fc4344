"""Python files that the user names: what they define, and where their code fails."""

from __future__ import annotations

import ast
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType


def problem_of_file(path: Path, attribute: str) -> str | None:
    """Why the file cannot define this name; None if it may. Does not run the file."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        return f"cannot read {path}: {error.strerror}"
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        return f"{path}{f' line {line}' if line else ''}: {getattr(error, 'msg', error)}"
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif not isinstance(node, ast.Expr | ast.Import):
            return None  # an assignment, an import of names or a condition may define it
    if attribute in names:
        return None
    return f"{path} has no {attribute!r}; it defines {', '.join(names) or 'nothing'}"


def load_file(path: Path, name: str) -> ModuleType:
    """Run a file as the module `name`. Raises what its code raises."""
    sys.path.insert(0, str(path.parent.resolve()))  # so that it finds the modules beside it
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as import does; dataclasses look there
    spec.loader.exec_module(module)
    return module


def where(error: BaseException, file: Path | None = None) -> str:
    """`my.py line 3: SyntaxError: invalid syntax`. Args: file: of which a line is preferred"""
    if isinstance(error, SyntaxError):
        return f"{error.filename} line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen")  # the machinery of imports
    ]
    frames = [frame for frame in frames if frame.filename == str(file)] or frames
    place = f"{frames[-1].filename} line {frames[-1].lineno}: " if frames else ""
    return f"{place}{type(error).__name__}: {error}"
