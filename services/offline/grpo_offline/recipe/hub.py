"""Uploads the trained model to a branch of a repository on the Hugging Face hub."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from grpo_offline.errors import HubRefused
from grpo_offline.recipe.reading import Recipe

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
