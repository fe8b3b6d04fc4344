"""Options of the `env-server` command, with the checks that need the tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from grpo_core.settings import Mistake, load_settings
from grpo_core.tree.environment import ACTIONS, EnvironmentOptions
from grpo_core.tree.environment_values import AGENT


class EnvServerSettings(EnvironmentOptions):
    __doc__ = EnvironmentOptions.__doc__

    def start_mistakes(self) -> Iterator[Mistake]:
        # The tasks; a mistyped option needs none of them.
        from grpo_env.loading import DEFAULT_RULE, problem_of, problem_of_agent, problem_of_function
        from grpo_env.sandbox import SandboxUnusable, sandbox_of
        from grpo_env.sandbox.code import AUTO

        tasks = [part.task for part in self.mixture] or [self.task]
        named = [("task", problem_of(task)) for task in tasks]
        named.append(("curriculum", problem_of_function(self.curriculum, DEFAULT_RULE)))
        if self.reward:
            named.append(("reward", problem_of(self.reward)))
        if self.agent:
            named.append(("agent", problem_of_agent(self.agent)))
        yield from (Mistake(option, problem) for option, problem in named if problem)
        needs_sandbox = self.task == AGENT and self.agent_command is not None
        if needs_sandbox or self.sandbox != AUTO:  # other tasks may run no code
            try:
                sandbox_of(self.sandbox)
            except SandboxUnusable as error:
                yield Mistake(None, str(error))
        yield from super().start_mistakes()

    @property
    def display_name(self) -> str:
        from grpo_env.loading import short_name

        return self.wandb_name or short_name(self.task)


def load_env_settings(
    argv: Sequence[str],
    dry_run_notes: Callable[[EnvServerSettings], Iterable[str]] = lambda _settings: (),
) -> EnvServerSettings:
    """Settings of a command line. A mistake ends the process with status 2 and one line.

    Args: dry_run_notes: as of `load_settings`; its errors pass
    """
    words = _task_first(argv)
    return load_settings(EnvServerSettings, words, at_start=True, dry_run_notes=dry_run_notes)


def _task_first(argv: Sequence[str]) -> list[str]:
    """`check my.py:reward` → `my.py:reward check`; `serve --task X` → `X serve`."""
    for number, word in enumerate(argv):
        if word == "--task" and number + 1 < len(argv):
            return [argv[number + 1], *argv[:number], *argv[number + 2 :]]
        if word.startswith("--task="):
            return [word.partition("=")[2], *argv[:number], *argv[number + 1 :]]
    if len(argv) > 1 and argv[0] in ACTIONS and not argv[1].startswith("-"):
        return [argv[1], argv[0], *argv[2:]]
    return [*argv]
