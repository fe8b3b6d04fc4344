"""Imported by every Python process of `as.sh` at its start: torch then reports fewer instructions.

vLLM chooses its kernels by functions such as `torch.cpu._is_avx512_supported`, which no variable
changes.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from typing import Any

ASKED = "torch.cpu"


class _Hiding(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, _path: Any, _target: Any = None) -> ModuleSpec | None:
        if fullname != ASKED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_hide(module: Any) -> None:
            execute(module)
            for name in os.environ["HIDDEN_INSTRUCTIONS"].split():
                asked = f"_is_{name}_supported"
                assert hasattr(module, asked), f"torch.cpu has no {asked}"
                setattr(module, asked, lambda: False)

        loader.exec_module = execute_and_hide
        return spec


if os.environ.get("HIDDEN_INSTRUCTIONS"):
    sys.meta_path.insert(0, _Hiding())
