"""Runs environments that were written for other libraries as tasks."""

from __future__ import annotations

from grpo_core.errors import GrpoError
from grpo_env.tasks import Task, TaskOptions

_MAX_SEQUENCES = "max_sequences"
"""The only argument of `--task-args` that an environment of verifiers does not get."""


class EnvironmentUnusable(GrpoError):
    """The environment cannot be loaded, or needs something that this task cannot do."""


class RolloutFailed(Exception):
    """The environment ended one rollout with an error. The group is lost, and the run goes on."""


class VerifiersTask(Task):
    """Lets verifiers conduct and rate the rollouts of an environment.

    The parts of the reward are verifiers' reward functions and metrics; the score is verifiers'
    reward.

    env_id: verifiers' name of the environment; arguments: those that it gets.
    """

    drives_itself = True
    blocks = False

    def __init__(self, env_id: str, options: TaskOptions) -> None:
        self.name = self.env_id = env_id
        super().__init__(options)
        self.arguments = dict(options.args)
        self.max_sequences = int(self.arguments.pop(_MAX_SEQUENCES, self.max_sequences))
