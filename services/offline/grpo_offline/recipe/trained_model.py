"""The trained model of a recipe: its chat template, its benchmarks, and its upload to a hub."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grpo_env.loading import problem_of
from grpo_offline.errors import BenchmarkFailed, HubRefused, RecipeInvalid
from grpo_offline.keys import OfflineKeys
from grpo_offline.recipe.reading import Recipe

TOKENIZER = "tokenizer"
"""Below the run's directory."""


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


def write_tokenizer(model: str, template: str, directory: Path) -> Path:
    """A tokenizer with this template. Args: directory: of the run"""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    target = directory / TOKENIZER
    tokenizer.save_pretrained(target)
    return target


def add_template(template: str, model_directory: Path) -> None:
    """Give a trained model the template that it was trained with."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model_directory)


FILE = "benchmarks.jsonl"
"""Below the run's directory, one line for each."""


@dataclass(frozen=True)
class Benchmark:
    """A task, and data in the place of its own."""

    task: str
    data: str | None


def benchmarks_of(words: Sequence[str], keys: OfflineKeys) -> list[Benchmark]:
    """`math` or `gsm8k=DIR`. Raises `RecipeInvalid`: there is no such task, or no server."""
    if words and keys.generation.backend == "local":
        raise RecipeInvalid("benchmarks: need a server; set use_vllm")
    return [*_read(words)]


def _read(words: Sequence[str]) -> Iterator[Benchmark]:
    for word in words:
        task, _, data = word.partition("=")
        if problem := problem_of(task):
            raise RecipeInvalid(f"benchmarks: {problem}")
        yield Benchmark(task, data or None)


def evaluate(benchmark: Benchmark, keys: OfflineKeys, directory: Path) -> None:
    """Raises `BenchmarkFailed`. Its output goes to the screen."""
    data = ["--data", benchmark.data] if benchmark.data else []
    command = [
        *(sys.executable, "-m", "grpo_env", benchmark.task, "evaluate"),
        *("--model", keys.model.train_id),
        *("--tokenizer", keys.env_server.get("tokenizer", keys.model.train_id)),
        *("--inference-url", keys.generation.base_url),
        *("--eval-output", str(directory / FILE)),
        *("--eval-items", str(keys.eval.num_ids)),
        *("--eval-samples", str(keys.eval.replicates)),
        *("--temperature", str(keys.eval.temperature)),
        *("--log-level", keys.logging.level),
        *data,
    ]
    done = subprocess.run(command)
    if done.returncode != 0:
        raise BenchmarkFailed(
            f"{benchmark.task}: the evaluation ended with status {done.returncode}; run it again: "
            f"{' '.join(command[2:])}"
        )


MAIN = "main"
_NOT_UPLOADED = ["*.tmp"]


@dataclass(frozen=True)
class HubTarget:
    """Args: overwrite: upload to a branch that exists already"""

    repository: str
    branch: str
    private: bool | None
    overwrite: bool
    token: str | None = field(repr=False)


def hub_target(recipe: Recipe, directory: Path) -> HubTarget | None:
    """None if nothing is uploaded."""
    if not (recipe["push_to_hub"] or recipe["push_to_hub_revision"]):
        return None
    branch = recipe["hub_model_revision"] or recipe["hub_revision"] or MAIN
    return HubTarget(
        recipe["hub_model_id"] or directory.absolute().name,
        branch,
        recipe["hub_private_repo"],
        recipe["overwrite_hub_revision"],
        recipe["hub_token"],
    )


def prepare(target: HubTarget) -> HubTarget:
    """Create the repository, and return the target with its full name. A run of days must not end
    with an upload that was never possible.

    Raises:
        HubRefused: no token, no permission, or a branch that must not be overwritten.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    api = HfApi(token=target.token)
    try:
        made = api.create_repo(target.repository, private=target.private, exist_ok=True)
        found = {ref.name for ref in api.list_repo_refs(made.repo_id).branches}
    except (HfHubHTTPError, LocalTokenNotFoundError, OSError) as error:
        raise HubRefused(f"hub_model_id: {target.repository}: {error}; see hub_token") from error
    if target.branch != MAIN and target.branch in found and not target.overwrite:
        raise HubRefused(
            f"hub_model_revision: the branch {target.branch} of {made.repo_id} exists; name "
            "another, or set overwrite_hub_revision"
        )
    return HubTarget(made.repo_id, target.branch, target.private, target.overwrite, target.token)


def upload(target: HubTarget, folder: Path) -> str:
    """Upload a model, and return its URL. Raises `HubRefused`; the model stays where it is."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi(token=target.token)
    try:
        if target.branch != MAIN:
            api.create_branch(target.repository, branch=target.branch, exist_ok=True)
        done = api.upload_folder(
            repo_id=target.repository,
            folder_path=folder,
            revision=target.branch,
            commit_message=f"Model of {folder.absolute().parent.name}",
            ignore_patterns=_NOT_UPLOADED,
        )
    except (HfHubHTTPError, OSError) as error:
        raise HubRefused(
            f"{target.repository}@{target.branch}: {error}; the model is in {folder}. Upload it "
            f"with: hf upload {target.repository} {folder} --revision {target.branch}"
        ) from error
    return str(done)
