"""The keys of one job: those that Hydra composed, on top of those of a run that goes on."""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpo_core.errors import problems_of
from grpo_offline.errors import KeysInvalid, RunUnusable
from grpo_offline.keys import OfflineKeys
from grpo_offline.run_files import resumed_keys

FOLLOWS = {
    "model.ref_id": "model.train_id",
    "eval.backend": "generation.backend",
    "eval.base_url": "generation.base_url",
}
"""Keys whose default is the value of another key."""
_SIZES = (
    *("data.problems_per_iteration", "data.rollouts_per_problem"),
    *("train.batch_size", "train.grad_accum_steps"),
)
"""A checkpoint counts optimizer steps, so an iteration must keep its number of them."""


def job_keys(composed: Mapping[str, Any], given: Collection[str]) -> OfflineKeys:
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
        earlier = resumed_keys(Path(resume))
        content = copy.deepcopy(earlier)
        for name in given:
            _put(content, name.split("."), value_of(composed, name))
        for name, source in FOLLOWS.items():
            if name not in given and value_of(earlier, name) == value_of(earlier, source):
                _put(content, name.split("."), value_of(content, source))
        _require_equal_sizes(earlier, content)
    try:
        keys = OfflineKeys.model_validate(content)
    except ValidationError as error:
        raise KeysInvalid(f"{problems_of(error)}; conf/offline_grpo.yaml lists all keys") from error
    if keys.logging.wandb.run_name:
        os.environ["WANDB_NAME"] = keys.logging.wandb.run_name
    return keys


def _require_equal_sizes(earlier: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    if changed := [name for name in _SIZES if value_of(earlier, name) != value_of(content, name)]:
        raise RunUnusable(
            f"checkpoint.resume: {', '.join(changed)} differs from that of the run, which counts "
            "in optimizer steps; leave it out, or start a new run from its final_model"
        )


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
