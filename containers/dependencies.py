"""`dependencies.py DIRECTORY...`: what our packages there need from others, a requirement a line.

Read from each `pyproject.toml`, so that an image can install it in a layer of its own, before any
of our source. `DIRECTORY[extra]` adds the requirements of that extra.
"""

import re
import sys
import tomllib
from pathlib import Path

OURS = re.compile(r"grpo-")


def main(arguments: list[str]) -> None:
    needed = {name for argument in arguments for name in requirements(argument)}
    print("\n".join(sorted(name for name in needed if not OURS.match(name))))  # noqa: T201


def requirements(argument: str) -> list[str]:
    """Of a directory, or of a directory and its extras: `services/trainer[wandb]`."""
    directory, _, extras = argument.rstrip("]").partition("[")
    project = tomllib.loads((Path(directory) / "pyproject.toml").read_text())["project"]
    optional = project.get("optional-dependencies", {})
    chosen = [optional[extra] for extra in extras.split(",") if extra]
    return [*project["dependencies"], *(name for names in chosen for name in names)]


if __name__ == "__main__":
    main(sys.argv[1:])
