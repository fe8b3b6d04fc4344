"""Names Redis keys, with a prefix per run so that several runs can share one Redis."""

from __future__ import annotations

DEFAULT_RUN_ID = "default"


def is_run_id(text: str) -> bool:
    """True if keys can contain it."""
    return bool(text) and not any(letter in "{}" or letter.isspace() for letter in text)


def run_prefix(run_id: str) -> str:
    """The braces put all keys of a run into one hash slot, as scripts on a cluster require."""
    return f"grpo:{{{run_id}}}:"


def served_weights_key(run_id: str) -> str:
    """A hash with the policy version of the served weights: `epoch` and `step`.

    The inference server writes it before it answers any request with new weights. run-api reads it
    with every group.
    """
    return run_prefix(run_id) + "served-weights"
