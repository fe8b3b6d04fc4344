"""The keys of the offline trainer by section."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from docs.generate.markdown import table
from grpo_runs.offline.keys import OfflineKeys


def keys() -> str:
    return table(["Key", "Default", "Meaning"], _rows(OfflineKeys, ""))


def _rows(section: type[BaseModel], prefix: str) -> Iterator[list[str]]:
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _rows(kind, f"{prefix}{name}.")
        else:
            yield [f"`{prefix}{name}`", _default(field), f"{field.description}."]


def _default(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    if isinstance(extra, dict):
        return f"that of `{str(extra['interpolation']).strip('${}')}`"
    value = field.get_default(call_default_factory=True)
    if value is None or value == "" or value in ((), {}):
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
