"""The keys of one job: those that Hydra composed, on top of those of a run that goes on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpo_core.validation import problems_of
from grpo_offline.errors import KeysInvalid
from grpo_offline.keys import OfflineKeys
from grpo_offline.run_files import resumed_keys


def keys_of_job(composed: Mapping[str, Any], given: Iterable[str]) -> OfflineKeys:
    """Args:
        composed: every key with its value
        given: the keys that the command line gives; of a run that goes on, all others stay

    Raises:
        KeysInvalid: a value is not valid.
        RunUnusable: `checkpoint.resume` is not the directory of a run.
    """
    resume = composed.get("checkpoint", {}).get("resume")
    content = dict(composed)
    if resume is not None:
        content = resumed_keys(Path(resume))
        for name in given:
            _put(content, name.split("."), value_of(composed, name))
    try:
        keys = OfflineKeys.model_validate(content)
    except ValidationError as error:
        raise KeysInvalid(f"{problems_of(error)}; conf/offline_grpo.yaml lists all keys") from error
    if keys.logging.wandb.run_name:
        os.environ["WANDB_NAME"] = keys.logging.wandb.run_name
    return keys


def value_of(content: Mapping[str, Any], name: str) -> Any:
    """Args: name: of a key, for example `train.lr`"""
    found: Any = content
    for part in name.split("."):
        found = found[part]
    return found


def _put(content: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    for part in parts[:-1]:
        content = content.setdefault(part, {})
    content[parts[-1]] = value
