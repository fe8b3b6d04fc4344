from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError, field_validator

from grpo_core.validation import problems_of


class Numbers(BaseModel):
    first: int
    second: int
    third: int
    fourth: int

    @field_validator("first")
    @classmethod
    def _is_even(cls, value: int) -> int:
        if value % 2:
            raise ValueError(f"{value} is odd; use an even number")
        return value


def test_each_problem_has_its_place_without_pydantics_own_words() -> None:
    with pytest.raises(ValidationError) as raised:
        Numbers.model_validate({"first": 1})
    assert problems_of(raised.value) == (
        "first: 1 is odd; use an even number; second: Field required; third: Field required "
        "(and 1 more)"
    )
