"""One thread for torch, since the models of these tests are small; and one of these models."""

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


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a tiny model, which no test changes."""
    from tests.unit.trainer.tiny_policy import model_directory

    return str(model_directory(tmp_path_factory.mktemp("tiny") / "model"))
