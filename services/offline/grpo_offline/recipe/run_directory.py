"""The directory of a recipe's run: continue it, refuse it, or move it aside."""

from __future__ import annotations

from pathlib import Path

from grpo_offline.errors import RecipeInvalid
from grpo_offline.recipe.reading import Recipe
from grpo_offline.run_files import RunFiles


def open_directory(recipe: Recipe, directory: Path) -> Path | None:
    """Make way for a new run, and return where an earlier one was moved to; None if it goes on, or
    if there is none.

    Raises:
        RecipeInvalid: there is an earlier run that must not go on, or none that should.
    """
    resumed = recipe["resume_from_checkpoint"]
    exists = RunFiles(directory).keys.is_file()
    if not exists:
        if isinstance(resumed, str) and resumed.lower() not in ("true", "false"):
            raise RecipeInvalid(f"resume_from_checkpoint: {directory} is no directory of a run")
        return None
    if recipe["overwrite_output_dir"]:
        return _moved_aside(directory)
    if resumed is False or (isinstance(resumed, str) and resumed.lower() == "false"):
        raise RecipeInvalid(
            f"resume_from_checkpoint: false, but output_dir {directory} has a run; name another "
            "output_dir, or set overwrite_output_dir, which moves the earlier run aside"
        )
    return None


def _moved_aside(directory: Path) -> Path:
    number = 1
    while (target := directory.with_name(f"{directory.name}.{number}")).exists():
        number += 1
    return directory.rename(target)
