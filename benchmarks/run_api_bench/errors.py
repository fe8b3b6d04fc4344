"""Errors that end the benchmark."""

from __future__ import annotations

from grpo_core.errors import GrpoError


class ApiBenchmarkFailed(GrpoError):
    """A server did not do what is measured, so that a number would say nothing."""
