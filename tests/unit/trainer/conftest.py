"""Limits torch to one thread: the models of these tests are too small for a second one."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    torch = sys.modules.get("torch")
    if torch is None:  # none of the selected tests computes anything
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
