"""The table of all keys of a recipe. The documentation and the tests read it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from grpo_offline.recipe.key import Key, owned_by
from grpo_offline.recipe.keys_grpo import GRPO_KEYS
from grpo_offline.recipe.keys_guide import ALIAS_KEYS, GUIDE_KEYS, MAXENT_KEYS
from grpo_offline.recipe.keys_model import MODEL_KEYS
from grpo_offline.recipe.keys_script import SCRIPT_KEYS
from grpo_offline.recipe.keys_training import TRAINING_KEYS

KEYS: tuple[Key, ...] = (
    *owned_by("GRPOConfig", (*TRAINING_KEYS, *GRPO_KEYS, *GUIDE_KEYS, *ALIAS_KEYS)),
    *owned_by("ModelConfig", MODEL_KEYS),
    *owned_by("ScriptArguments", SCRIPT_KEYS),
)
TABLE: Mapping[str, Key] = MappingProxyType({key.name: key for key in KEYS})
MAXENT_NAMES = frozenset(key.name for key in MAXENT_KEYS)
