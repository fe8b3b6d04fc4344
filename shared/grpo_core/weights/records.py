"""Flat records, stored as a Redis hash or stream entry with text values."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from grpo_core.errors import ProtocolViolation, problems_of
from grpo_core.wire.fields import Step
from grpo_core.wire.policy_version import PolicyVersion


class RedisRecord(BaseModel):
    """Unknown fields are ignored, so that a newer process may write more of them."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def on_the_wire(self) -> dict[str, str]:
        plain = self.model_dump(mode="json", exclude_none=True)
        return {
            name: str(int(value) if isinstance(value, bool) else value)
            for name, value in plain.items()
        }

    @classmethod
    def from_wire(cls, fields: dict[str, str]) -> Self:
        """Raises `ProtocolViolation` with the invalid fields."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise ProtocolViolation(
                f"the record {cls.__name__} in Redis has invalid fields: {problems_of(error)}"
            ) from None


class VersionedRecord(RedisRecord):
    epoch: Step
    step: Step

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self.epoch, self.step)
