"""`src/grpo.py` and `src/maxent-grpo.py`: run a recipe, and give its model the chat template, the
benchmarks and the place on a hub that the recipe names."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from grpo_core.cpu import prepare_cpu
from grpo_core.errors import GrpoError
from grpo_core.logs import configure_logging
from grpo_core.service_url import ServiceUrl
from grpo_core.settings.command import URL_VARIABLES
from grpo_core.weights.model_files import load_tokenizer
from grpo_env.loading import problem_of
from grpo_runs.offline.command_line import EXIT_FAILED, EXIT_USAGE, end, exit_on_signals
from grpo_runs.offline.errors import BenchmarkFailed, HubRefused, KeysInvalid, RecipeInvalid
from grpo_runs.offline.keys import OfflineKeys, in_recipe
from grpo_runs.offline.run_files import RunFiles
from grpo_runs.offline.screen import open_screen
from grpo_runs.recipe.keys import Script, TrainingRecipe, help_lines, read_recipe
from grpo_runs.recipe.task import row_count
from grpo_runs.recipe.translation import names_of, notes, rank_count, run_directory, translate

PROGS = {"grpo": "src/grpo.py", "maxent": "src/maxent-grpo.py"}
TOKENIZER, FILE = "tokenizer", "benchmarks.jsonl"
"""Below the run's directory: the tokenizer with the template, and one line for each benchmark."""
MAIN = "main"
_NOT_UPLOADED = ["*.tmp"]


def main(script: Script, argv: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else [*argv]
    prog = PROGS[script]
    if "--help" in words or "-h" in words:
        sys.stdout.writelines(f"{line}\n" for line in help_lines(prog))
        return
    exit_on_signals()
    names = names_of()
    try:
        ranks = rank_count(os.environ)
        recipe = read_recipe(words, script)
        names = names_of(recipe)
        os.environ.update({str(name): str(text) for name, text in recipe["env"].items()})
        keys = translate(recipe, row_count, ranks)
        if os.environ.get("RANK", "0") != "0":
            _follow(keys, run_directory(recipe))
            return
        require_benchmarks(recipe["benchmarks"], keys)
        _run(recipe, keys)
    except RecipeInvalid as error:
        end(prog, EXIT_USAGE, f"\n{prog}: ".join(str(error).splitlines()))
    except KeysInvalid as error:
        lines = in_recipe(str(error), names).splitlines()
        end(prog, EXIT_USAGE, f"\n{prog}: ".join(lines))
    except GrpoError as error:
        end(prog, EXIT_FAILED, in_recipe(f"{type(error).__name__}: {error}", names))


def _follow(keys: OfflineKeys, directory: Path) -> None:
    """Take part as a rank above 0. Rank 0 samples, publishes and writes the files of the run."""
    configure_logging("offline", keys.logging.level)
    prepare_cpu()
    from grpo_runs.offline.loop import follow_offline

    follow_offline(keys, directory.absolute())


def _run(recipe: TrainingRecipe, keys: OfflineKeys) -> None:
    directory = run_directory(recipe)
    screen = open_screen(keys, names_of(recipe))
    template = None if recipe["chat_template"] is None else template_text(recipe["chat_template"])
    upload = upload_of(recipe, directory)
    if recipe["wandb_entity"]:
        os.environ["WANDB_ENTITY"] = recipe["wandb_entity"]
    if keys.logging.wandb.run_name:
        os.environ["WANDB_NAME"] = keys.logging.wandb.run_name
    from grpo_runs.offline.loop import run_offline

    for note in notes(recipe):
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
    if upload is not None:
        screen.line(f"uploaded: {upload(model)}")


def open_directory(recipe: TrainingRecipe, directory: Path) -> Path | None:
    """Make way for a new run, and return where an earlier one was moved to; None if it goes on, or
    if there is none.

    Raises:
        RecipeInvalid: there is an earlier run that must not go on, or none that should.
    """
    resumed = recipe["resume_from_checkpoint"]
    word = str(resumed).lower()
    if not RunFiles(directory).keys.is_file():
        if isinstance(resumed, str) and word not in ("true", "false"):
            raise RecipeInvalid(f"resume_from_checkpoint: {directory} is no directory of a run")
        return None
    if recipe["overwrite_output_dir"]:
        number = 1
        while (target := directory.with_name(f"{directory.name}.{number}")).exists():
            number += 1
        return directory.rename(target)
    if word == "false":
        raise RecipeInvalid(
            f"resume_from_checkpoint: false, but output_dir {directory} has a run; name another "
            "output_dir, or set overwrite_output_dir, which moves the earlier run aside"
        )
    return None


def template_text(value: str) -> str:
    """The template itself, or the content of a file. Raises `RecipeInvalid`."""
    if "{" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeInvalid(
            f"chat_template: {value} is no template, and cannot be read: {error.strerror}"
        ) from error


def save_tokenizer(source: str | Path, template: str, directory: Path) -> None:
    """Write a model's tokenizer with this template. Args: source: the model"""
    import transformers

    tokenizer = load_tokenizer(str(source), transformers)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)


def require_benchmarks(words: Sequence[str], keys: OfflineKeys) -> None:
    """Args: words: `math` or `gsm8k=DIR`

    Raises `RecipeInvalid`: there is no such task, or no server."""
    if words and keys.generation.backend == "local":
        raise RecipeInvalid("benchmarks: need a server; set use_vllm")
    for word in words:
        if problem := problem_of(word.partition("=")[0]):
            raise RecipeInvalid(f"benchmarks: {problem}")


def evaluate(word: str, keys: OfflineKeys, directory: Path) -> None:
    """Run one benchmark. Its output goes to the screen. Raises `BenchmarkFailed`."""
    task, _, data = word.partition("=")
    command = [
        *(sys.executable, "-m", "grpo_env", task, "evaluate"),
        *("--model", keys.model.train_id),
        *("--tokenizer", keys.env_server.get("tokenizer", keys.model.train_id)),
        *("--eval-output", str(directory / FILE)),
        *("--eval-items", str(keys.eval.num_ids)),
        *("--eval-samples", str(keys.eval.replicates)),
        *("--temperature", str(keys.eval.temperature)),
        *("--log-level", keys.logging.level),
        *(("--data", data) if data else ()),
    ]
    url = ServiceUrl(keys.generation.base_url)
    variable = {URL_VARIABLES["inference_url"]: url.with_userinfo}
    done = subprocess.run(command, env=os.environ | variable)
    if done.returncode != 0:
        raise BenchmarkFailed(
            f"{task}: the evaluation ended with status {done.returncode}; run it again: "
            f"{' '.join([*command[2:], '--inference-url', url])}"
        )


def upload_of(recipe: TrainingRecipe, directory: Path) -> Callable[[Path], str] | None:
    """Create the repository that the recipe names on the Hugging Face hub, and return the function
    that uploads a model and returns its URL; None if nothing is uploaded. A run of days must not
    end with an upload that was never possible.

    Raises:
        HubRefused: no token, no permission, or a branch that must not be overwritten. The function
            raises it too; the model stays where it is.
    """
    if not (recipe["push_to_hub"] or recipe["push_to_hub_revision"]):
        return None
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    name = recipe["hub_model_id"] or directory.absolute().name
    branch = recipe["hub_model_revision"] or recipe["hub_revision"] or MAIN
    api = HfApi(token=recipe["hub_token"])
    try:
        made = api.create_repo(name, private=recipe["hub_private_repo"], exist_ok=True).repo_id
        found = {ref.name for ref in api.list_repo_refs(made).branches}
    except (HfHubHTTPError, LocalTokenNotFoundError, OSError) as error:
        raise HubRefused(f"hub_model_id: {name}: {error}; see hub_token") from error
    if branch != MAIN and branch in found and not recipe["overwrite_hub_revision"]:
        raise HubRefused(
            f"hub_model_revision: the branch {branch} of {made} exists; name another, or set "
            "overwrite_hub_revision"
        )

    def upload(folder: Path) -> str:
        message = f"Model of {folder.absolute().parent.name}"
        try:
            if branch != MAIN:
                api.create_branch(made, branch=branch, exist_ok=True)
            done = api.upload_folder(
                repo_id=made,
                folder_path=folder,
                revision=branch,
                commit_message=message,
                ignore_patterns=_NOT_UPLOADED,
            )
        except (HfHubHTTPError, OSError) as error:
            raise HubRefused(
                f"{made}@{branch}: {error}; the model is in {folder}. Upload it with: hf upload "
                f"{made} {folder} --revision {branch}"
            ) from error
        return str(done)

    return upload
