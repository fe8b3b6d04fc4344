"""Errors of the offline trainer. Each message says what is wrong, where, and what to do next."""

from __future__ import annotations

from grpo_core.errors import GrpoError


class ServerUnsuitable(GrpoError):
    """The server cannot do what the keys ask for."""


class StaleServer(GrpoError):
    """Tokens were sampled from other weights than the trainer's."""


class RunUnusable(GrpoError):
    """The directory of a run cannot be continued."""


class KeysInvalid(GrpoError):
    """A key does not exist, or its value is not valid."""


class RecipeInvalid(GrpoError):
    """Keys of a recipe do not exist, are not supported, or exclude each other."""


class HubRefused(GrpoError):
    """The hub did not accept the trained model."""


class BenchmarkFailed(GrpoError):
    """An evaluation after the run did not end well. The trained model is complete."""


class NoSweep(GrpoError):
    """A directory holds no jobs of a sweep."""
