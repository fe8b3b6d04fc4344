"""One thread for torch, since the models of these tests are small; and one of these models."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.support.threads import one_thread


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    if "torch" not in sys.modules:  # none of the selected tests computes anything
        yield
        return
    with one_thread():
        yield


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a tiny model, which no test changes."""
    from tests.unit.trainer.tiny_policy import model_directory

    return str(model_directory(tmp_path_factory.mktemp("tiny") / "model"))
