"""These tests need a CUDA device; `make test-gpu` runs them, part by part."""

from __future__ import annotations

import pytest
import torch

HERE = "tests/gpu/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in (item for item in items if HERE in item.nodeid):
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no GPU: run make test-gpu on a host with one"))
