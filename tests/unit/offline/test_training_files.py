"""training.sh, environment.yml and the page of the training guide agree with the code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import yaml

from grpo_offline.recipe.keys import TABLE
from grpo_offline.recipe.reading import GRPOConfig, ModelConfig, ScriptArguments

ROOT = Path(__file__).parents[3]
SCRIPT = (ROOT / "training.sh").read_text()
PAGE = (ROOT / "docs/how-to/training-guide.md").read_text()
FIELDS = json.loads((Path(__file__).parent / "trl_1_16_0_fields.json").read_text())
"""Names and defaults of the fields of TRL's classes, by `dataclasses.fields`."""
OTHER_DEFAULTS = ("dtype", "eval_dataset_split")


def test_every_field_of_trl_is_in_the_table_with_trls_default() -> None:
    assert [len(fields) for fields in FIELDS.values()] == [189, 19, 6]
    for kind in (GRPOConfig, ModelConfig, ScriptArguments):
        for name, default in FIELDS[kind.__name__].items():
            key = TABLE[name]
            assert key.owner == kind.__name__, name
            if key.alias_of or name in OTHER_DEFAULTS:
                continue
            assert name in kind.__dataclass_fields__
            wanted = [default] if key.is_list and isinstance(default, str) else default
            assert key.default == wanted, name


def test_the_page_lists_every_variable() -> None:
    of_script = set(re.findall(r"^(?:export )?([A-Z_0-9]+)=\$\{\1:-", SCRIPT, re.MULTILINE))
    of_script |= set(re.findall(r"\$\{([A-Z_0-9]+):-[^}]", SCRIPT))
    plan = (ROOT / "services/offline/grpo_offline/recipe/server_plan.py").read_text()
    of_plan = set(re.findall(r'environment\.get\("([A-Z_]+)"', plan)) - {"GPUS"}
    listed = set(re.findall(r"^\| `([A-Z_]+)` \|", PAGE, re.MULTILINE))
    ours = {"CONFIG", "USE_CONDA", "PYTHON", "VLLM_MODEL", "SYNC_MODE", *of_plan}
    from_outside = {"SLURM_CPUS_PER_TASK", "SLURM_SUBMIT_DIR", "CUDA_VISIBLE_DEVICES"}

    assert listed >= ours
    assert of_script - from_outside - {"TIMESTAMP", "MAIN_PROCESS_PORT"} <= listed


def test_the_conda_environment_installs_every_package() -> None:
    content = yaml.safe_load((ROOT / "environment.yml").read_text())
    words = [line.split() for line in content["dependencies"][-1]["pip"]]
    packages = {path.removeprefix("./") for option, path in words if option == "--editable"}
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")

    assert packages == set(re.search(r"^PACKAGES := (.*)$", makefile, re.MULTILINE)[1].split())
    for option, path in words:
        assert (ROOT / path).exists(), option


def test_shellcheck_finds_nothing() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run(
        [shellcheck, ROOT / "training.sh"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
