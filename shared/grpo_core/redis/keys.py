"""Names Redis keys, with a prefix per run so that several runs can share one Redis."""

from __future__ import annotations


def default_run_id(port: int) -> str:
    """The run of a service that listens on `port`, so that runs on one host never meet."""
    return f"port-{port}"


def is_run_id(text: str) -> bool:
    """True if keys can contain it."""
    return bool(text) and not any(letter in "{}" or letter.isspace() for letter in text)


def run_id_or_default(value: str, port: int) -> str:
    """The run id of a service on `port`. Raises `ValueError` if keys cannot contain it."""
    value = value or default_run_id(port)
    if not is_run_id(value):
        raise ValueError("expected a name without spaces or braces")
    return value


def run_prefix(run_id: str) -> str:
    """The braces put all keys of a run into one hash slot, as scripts on a cluster require."""
    return f"grpo:{{{run_id}}}:"


def served_weights_key(run_id: str) -> str:
    """A hash with the policy version of the served weights: `epoch` and `step`.

    The inference server writes it before it answers any request with new weights. run-api reads it
    with every group.
    """
    return run_prefix(run_id) + "served-weights"


def served_weights_followers_key(run_id: str) -> str:
    """A set of keys like `served_weights_key`: the records of run-apis whose run has another id.

    run-api adds its own key if a trainer registers that uses the inference server of `run_id`. The
    inference server writes its record to these keys too.
    """
    return run_prefix(run_id) + "served-weights:followers"
