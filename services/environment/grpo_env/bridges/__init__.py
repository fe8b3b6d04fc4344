"""Runs environments that were written for other libraries as tasks."""

from __future__ import annotations

from grpo_core.errors import GrpoError


class EnvironmentUnusable(GrpoError):
    """The environment cannot be loaded, or needs something that this task cannot do."""


class RolloutFailed(Exception):
    """The environment ended one rollout with an error. The group is lost, and the run goes on."""
