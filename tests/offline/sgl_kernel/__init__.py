"""Replaces SGLang's CUDA kernels, so that its server runs on a CPU.

Every name and every submodule can be imported, and a call raises `NotImplementedError`. In float32
and with the options of `test_sglang_server.py`, the server calls none of them.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


class _Kernel:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> _Kernel:
        return _named(f"{self._name}.{attribute}")

    def __call__(self, *_args: Any, **_options: Any) -> Any:
        raise NotImplementedError(f"{self._name} needs a GPU")


def _named(name: str) -> _Kernel:
    if name.rpartition(".")[2].startswith("__"):  # Python looks for these, e.g. __path__
        raise AttributeError(name)
    return _Kernel(name)


def __getattr__(name: str) -> _Kernel:
    return _named(f"{__name__}.{name}")


class _Submodules(MetaPathFinder, Loader):
    """Finds every module below this package."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: types.ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        inside = fullname.startswith(f"{__name__}.")
        return ModuleSpec(fullname, self, is_package=True) if inside else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: _named(f"{spec.name}.{name}")  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """The module has no code."""


sys.meta_path.append(_Submodules())
