"""The keys of the offline trainer: a table for the pages, and the file that Hydra composes, which
`python -m docs.generate.offline_keys` writes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from docs.generate.markdown import table
from grpo_runs.offline.key_names import in_keys
from grpo_runs.offline.keys import CONFIG_FILE, KEYS, OfflineKeys, is_section, sets_of

_WIDTH = 98
_HEAD = """\
# Every key of the offline trainer with its default. Generated from grpo_runs/offline/keys.py.
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


def keys() -> str:
    rows = [[f"`{path}`", _default(field), _described(field)] for path, field in KEYS.items()]
    return table(["Key", "Default", "Meaning"], rows)


def _described(field: FieldInfo) -> str:
    return in_keys(f"{field.description}.")


def _default(field: FieldInfo) -> str:
    if source := sets_of(field).follows:
        return f"that of `{source}`"
    value = field.get_default(call_default_factory=True)
    if value is None or value == "" or value in ((), {}):
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def config_text() -> str:
    return _HEAD + "\n".join(_lines(OfflineKeys, "")) + "\n" + _TAIL


def _lines(section: type[BaseModel], indent: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield from ([""] if not indent else [])
        if is_section(field.annotation):
            yield f"{indent}{name}:"
            yield from _lines(field.annotation, indent + "  ")  # type: ignore[arg-type]
            continue
        yield from textwrap.wrap(
            _described(field),
            _WIDTH,
            initial_indent=f"{indent}# ",
            subsequent_indent=f"{indent}# ",
        )
        yield f"{indent}{name}: {_written(field)}"


def _written(field: FieldInfo) -> str:
    if source := sets_of(field).follows:
        return f"${{{source}}}"
    value = field.get_default(call_default_factory=True)
    value = [*value] if isinstance(value, tuple) else value
    return (
        yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
    )


if __name__ == "__main__":
    CONFIG_FILE.write_text(config_text())
