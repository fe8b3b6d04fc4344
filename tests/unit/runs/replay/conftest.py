"""The tiny model of the trainer's tests, and one thread for torch."""

from tests.unit.trainer.conftest import _one_thread, model

__all__ = ["_one_thread", "model"]
