"""Keys of a recipe, by what becomes of them."""

from __future__ import annotations

from docs.generate.markdown import table
from grpo_runs.recipe.keys import KEYS

_HEAD = {"used": "Sets", "without-effect": "Reason", "refused": "Reason"}


def keys(use: str) -> str:
    """Args: use: used, without-effect or refused"""
    rows = [
        [f"`{key.name}`", key.shown_default, f"{key.text}."]
        for key in KEYS
        if key.use == use.replace("-", " ")
    ]
    return table(["Key", "Default", _HEAD[use]], rows)
