"""`src/grpo.py` and `src/maxent-grpo.py`: run a recipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from grpo_core.cpu import share_cores
from grpo_core.errors import GrpoError
from grpo_core.logs import configure_logging
from grpo_env.tasks import TaskOptions
from grpo_env.tasks.items import training_items
from grpo_runs.offline.command_line import EXIT_FAILED, EXIT_USAGE, end, exit_on_signals
from grpo_runs.offline.errors import KeysInvalid, RecipeInvalid
from grpo_runs.offline.key_names import in_recipe
from grpo_runs.offline.run_files import RunFiles
from grpo_runs.offline.screen import open_screen
from grpo_runs.recipe.data import environment_options
from grpo_runs.recipe.keys import help_text
from grpo_runs.recipe.reading import TrainingRecipe, is_leader, rank_count, read_recipe
from grpo_runs.recipe.task import RecipeTask
from grpo_runs.recipe.trained_model import (
    TOKENIZER,
    evaluate,
    hub_target,
    require_benchmarks,
    save_tokenizer,
    template_text,
    upload,
)
from grpo_runs.recipe.translation import Translated, names_of_recipe, translate

Script = Literal["grpo", "maxent"]
PROGS = {"grpo": "src/grpo.py", "maxent": "src/maxent-grpo.py"}


def main(script: Script, argv: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else [*argv]
    if "--help" in words or "-h" in words:
        sys.stdout.write(help_text(PROGS[script]))
        return
    exit_on_signals()
    try:
        ranks = rank_count(os.environ)
        recipe = read_recipe(words)
        os.environ.update(recipe.variables)
        translated = translate(recipe, script, lambda: row_count(recipe), ranks)
        if not is_leader(os.environ):
            _follow(translated)
            return
        require_benchmarks(recipe["benchmarks"], translated.keys)
        _run(recipe, translated)
    except RecipeInvalid as error:
        end(PROGS[script], EXIT_USAGE, str(error))
    except KeysInvalid as error:
        end(PROGS[script], EXIT_USAGE, in_recipe(str(error), names_of_recipe()))
    except GrpoError as error:
        text = f"{type(error).__name__}: {error}"
        end(PROGS[script], EXIT_FAILED, in_recipe(text, names_of_recipe()))


def row_count(recipe: TrainingRecipe) -> int:
    """Number of training rows. Raises `DataUnusable`."""
    options = environment_options(recipe)
    task = RecipeTask(
        TaskOptions(args=options["task_args"], system_prompt=options.get("system_prompt"))
    )
    task.held_out = options.get("held_out", task.held_out)
    try:
        return len(training_items(task))
    finally:
        task.close()


def _follow(translated: Translated) -> None:
    """Take part as a rank above 0."""
    configure_logging("offline", translated.keys.logging.level)
    share_cores()
    from grpo_runs.offline.loop import follow_offline

    follow_offline(translated.keys, translated.directory.absolute())


def _run(recipe: TrainingRecipe, translated: Translated) -> None:
    keys, directory = translated.keys, translated.directory
    screen = open_screen(keys, names_of_recipe())
    template = None if recipe["chat_template"] is None else template_text(recipe["chat_template"])
    target = hub_target(recipe, directory)
    if recipe["wandb_entity"]:
        os.environ["WANDB_ENTITY"] = recipe["wandb_entity"]
    if keys.logging.wandb.run_name:
        os.environ["WANDB_NAME"] = keys.logging.wandb.run_name
    from grpo_runs.offline.loop import run_offline

    for note in translated.notes:
        screen.line(f"without effect: {note}")
    moved = open_directory(recipe, directory)
    if moved is not None:
        screen.line(f"the earlier run is in {moved}")
    if template is not None:
        tokenizer = directory.absolute() / TOKENIZER
        save_tokenizer(keys.model.train_id, template, tokenizer)
        environment = keys.env_server | {"tokenizer": str(tokenizer)}
        keys = keys.model_copy(update={"env_server": environment})
    run_offline(keys, directory.absolute(), screen)
    model = RunFiles(directory).model
    if template is not None:  # the model gets the template that it was trained with
        save_tokenizer(model, template, model)
    for benchmark in recipe["benchmarks"]:
        screen.line(f"benchmark {benchmark.partition('=')[0]}:")
        evaluate(benchmark, keys, directory)
    if target is not None:
        screen.line(f"uploaded: {upload(target, model)}")


def open_directory(recipe: TrainingRecipe, directory: Path) -> Path | None:
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
        number = 1
        while (target := directory.with_name(f"{directory.name}.{number}")).exists():
            number += 1
        return directory.rename(target)
    if resumed is False or (isinstance(resumed, str) and resumed.lower() == "false"):
        raise RecipeInvalid(
            f"resume_from_checkpoint: false, but output_dir {directory} has a run; name another "
            "output_dir, or set overwrite_output_dir, which moves the earlier run aside"
        )
    return None
