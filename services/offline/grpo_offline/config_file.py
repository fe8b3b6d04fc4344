"""Writes `conf/offline_grpo.yaml`, which Hydra composes with the command line, from the keys."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from grpo_offline.keys import OfflineKeys

CONFIG_FILE = Path(__file__).parent / "conf" / "offline_grpo.yaml"
_WIDTH = 98
_HEAD = """\
# Every key of the offline trainer with its default. Generated from grpo_offline/keys.py.
#
#   python run_offline_grpo.py train.lr=2e-5 data.task=my.py:reward
#   python run_offline_grpo.py -m train.lr=1e-5,2e-5

defaults:
  - _self_
  - override hydra/job_logging: none
  - override hydra/hydra_logging: none

"""
_TAIL = """
hydra:
  run:
    dir: outputs/${now:%Y-%m-%d}/${now:%H-%M-%S}
  sweep:
    dir: multirun/${now:%Y-%m-%d}/${now:%H-%M-%S}
    subdir: ${hydra.job.num}
"""


def config_text() -> str:
    return _HEAD + "\n".join(_lines(OfflineKeys, "")) + "\n" + _TAIL


def _lines(section: type[BaseModel], indent: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from ([""] if not indent else [])
            yield f"{indent}{name}:"
            yield from _lines(kind, indent + "  ")
            continue
        comment = f"{field.description}."
        yield from ([""] if not indent else [])
        yield from textwrap.wrap(
            comment, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
        )
        yield f"{indent}{name}: {_written(field)}"


def _written(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    if isinstance(extra, dict):
        return str(extra["interpolation"])
    value = field.get_default(call_default_factory=True)
    value = [*value] if isinstance(value, tuple) else value
    return (
        yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
    )


if __name__ == "__main__":
    CONFIG_FILE.write_text(config_text())
