"""Imports transformers without torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hidden_torch() -> Iterator[None]:
    """While transformers is imported, which otherwise imports torch wherever it is installed: 5 s
    of a core and 340 MB for each environment, whose tokenizer needs none."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # which says that it is missing
    # A transformers that was imported with torch cannot go on without it.
    if "torch" in sys.modules or "transformers" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # Python's sign for "not to be found"
    try:
        yield
    finally:
        del sys.modules["torch"]  # what looks for it later, as datasets does, may find it
