"""The trained model of a recipe: its chat template, its benchmarks, and its upload to a hub."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grpo_env.loading import problem_of
from grpo_runs.offline.errors import BenchmarkFailed, HubRefused, RecipeInvalid
from grpo_runs.offline.keys import OfflineKeys
from grpo_runs.recipe.reading import TrainingRecipe

TOKENIZER, FILE = "tokenizer", "benchmarks.jsonl"
"""Below the run's directory: the tokenizer with the template, and one line for each benchmark."""
MAIN = "main"
_NOT_UPLOADED = ["*.tmp"]


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
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
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
        *("--inference-url", keys.generation.base_url),
        *("--eval-output", str(directory / FILE)),
        *("--eval-items", str(keys.eval.num_ids)),
        *("--eval-samples", str(keys.eval.replicates)),
        *("--temperature", str(keys.eval.temperature)),
        *("--log-level", keys.logging.level),
        *(("--data", data) if data else ()),
    ]
    done = subprocess.run(command)
    if done.returncode != 0:
        raise BenchmarkFailed(
            f"{task}: the evaluation ended with status {done.returncode}; run it again: "
            f"{' '.join(command[2:])}"
        )


@dataclass(frozen=True)
class HubTarget:
    """A branch of a repository on the Hugging Face hub."""

    repository: str
    branch: str
    token: str | None = field(repr=False)


def hub_target(recipe: TrainingRecipe, directory: Path) -> HubTarget | None:
    """Create the repository that the recipe names; None if nothing is uploaded. A run of days must
    not end with an upload that was never possible.

    Raises:
        HubRefused: no token, no permission, or a branch that must not be overwritten.
    """
    if not (recipe["push_to_hub"] or recipe["push_to_hub_revision"]):
        return None
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    name, token = recipe["hub_model_id"] or directory.absolute().name, recipe["hub_token"]
    branch = recipe["hub_model_revision"] or recipe["hub_revision"] or MAIN
    api = HfApi(token=token)
    try:
        made = api.create_repo(name, private=recipe["hub_private_repo"], exist_ok=True)
        found = {ref.name for ref in api.list_repo_refs(made.repo_id).branches}
    except (HfHubHTTPError, LocalTokenNotFoundError, OSError) as error:
        raise HubRefused(f"hub_model_id: {name}: {error}; see hub_token") from error
    if branch != MAIN and branch in found and not recipe["overwrite_hub_revision"]:
        raise HubRefused(
            f"hub_model_revision: the branch {branch} of {made.repo_id} exists; name another, or "
            "set overwrite_hub_revision"
        )
    return HubTarget(made.repo_id, branch, token)


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
