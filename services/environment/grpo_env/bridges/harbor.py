"""Tasks in the form of Harbor: the policy works in a container, and tests in it give the reward.

https://github.com/harbor-framework/harbor
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, TypeAdapter

from grpo_core.tree.environment_values import environment_name
from grpo_env.bridges import EnvironmentUnusable, refuse_options
from grpo_env.bridges.episodes import EpisodeTask, Observation, Result
from grpo_env.bridges.harbor_tasks import HarborDirectory, read_task, task_directories
from grpo_env.sandbox.container import OUTPUT_BYTES, Container, container, succeed, succeed_at_start
from grpo_env.sandbox.interface import MIB, SandboxFailed, SandboxUnusable
from grpo_env.tasks import Answer, Message, RolloutFailed, Row, Split, TaskOptions
from grpo_env.tasks.tool_calls import ToolCall, text_parameters, tool_calls

BASH: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command with bash. Files stay; each call begins in the working "
        "directory.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command."}},
            "required": ["command"],
        },
    },
}
_IMAGE = "grpo-harbor"
_LOGS = "/logs/verifier"
_TASK = "task"
_PROBE_S = 30.0
_REWARDS = TypeAdapter(
    Annotated[dict[str, FiniteFloat], Field(min_length=1)], config={"strict": True}
)
_LARGEST_ARGUMENT_BYTES = 128 * 1024  # MAX_ARG_STRLEN of Linux


class HarborTask(EpisodeTask):
    """Each row is the directory of a task. The policy calls `bash` until it answers without a call,
    then `tests/test.sh` writes the reward.

    Raises:
        EnvironmentUnusable: there is no task, or one of them cannot be used.
    """

    tools = (BASH,)
    defaults: Mapping[str, Any] = {
        "max_turns": 30,
        "command_s": 60.0,
        "containers": 8,
        "network": "none",
        "variables": (),
    }

    def __init__(self, directory: str, options: TaskOptions) -> None:
        refuse_options(directory, options, "data", "data_config", "eval_data", "columns")
        super().__init__(environment_name(directory), options)
        root, network = Path(directory), str(self.arguments["network"])
        variables = self.arguments["variables"]
        if isinstance(variables, str):
            raise EnvironmentUnusable(f"variables: expected a list of names; got {variables!r}")
        self._tasks = {
            path.relative_to(root.expanduser()).as_posix(): read_task(path, network, variables)
            for path in task_directories(root)
        }
        self._images: dict[str, str] = {}
        self._building: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._containers = asyncio.Semaphore(int(self.arguments["containers"]))

    def rows(self, split: Split) -> Sequence[Row] | None:
        """The tasks, by their names. Raises `SandboxUnusable` if Docker does not answer."""
        succeed_at_start(["version"], "{error} Start it, or set DOCKER_HOST")
        return [{_TASK: name} for name in self._tasks] if split == "train" else None

    def prompt(self, row: Row) -> list[Message]:
        instruction = self._tasks[row[_TASK]].instruction
        return [*self._opening(), {"role": "user", "content": instruction}]

    @asynccontextmanager
    async def episode(self, row: Row) -> AsyncIterator[_HarborEpisode]:
        task = self._tasks[row[_TASK]]
        image = await self._image(task)
        async with self._containers, container(image, task.resources) as opened:
            yield _HarborEpisode(task, opened, float(self.arguments["command_s"]))

    async def _image(self, task: HarborDirectory) -> str:
        """Of the task, built at its first use. Raises `SandboxUnusable` if that fails."""
        if image := task.config.environment.docker_image:
            return image
        name = f"{_IMAGE}:{hashlib.sha256(str(task.path.resolve()).encode()).hexdigest()[:16]}"
        async with self._building[name]:
            if name not in self._images:
                words = ["build", "--quiet", "--tag", name, str(task.path / "environment")]
                try:
                    await succeed(words, task.config.environment.build_timeout_sec)
                except SandboxFailed as error:
                    raise SandboxUnusable(str(error)) from error
                self._images[name] = name
        return name


class _HarborEpisode:
    """See `episodes.Episode`."""

    tools: Sequence[Mapping[str, Any]] = (BASH,)

    def __init__(self, task: HarborDirectory, opened: Container, command_s: float) -> None:
        self._task, self._container, self._command_s = task, opened, command_s

    async def reset(self) -> Observation:
        made = f"mkdir -p {_LOGS} /logs/agent /logs/artifacts && chmod 777 /logs/*"
        ended = await self._container.run(made, _PROBE_S, user="root")
        if not ended.ok:
            raise EnvironmentUnusable(
                f"the image of {self._task.path} lacks bash or timeout: {ended.for_model()}"
            )
        return Observation([{"role": "user", "content": self._task.instruction}])

    async def act(self, answer: Answer) -> Observation:
        calls = tool_calls(answer, text_parameters(self.tools))
        messages: list[Message] = []
        for call in calls:
            text = await self._answered(call)
            messages.append({"role": "tool", "name": call.name, "content": text})
        return Observation(messages, done=not calls, reason="" if calls else "no call")

    async def _answered(self, call: ToolCall) -> str:
        command = call.arguments.get("command")
        if call.error or call.name != "bash" or not isinstance(command, str):
            return f"error: {call.error or 'expected a call of bash with the argument command'}"
        if not is_argument(command):
            return "error: a command has fewer than 128 KiB of UTF-8, without NUL characters"
        ended = await self._container.run(
            command, self._command_s, user=self._task.config.agent.user
        )
        return ended.for_model()

    async def result(self) -> Result:
        """Run the tests, and read the reward that they write."""
        task, verifier = self._task, self._task.config.verifier
        await self._container.copy_in(task.path / "tests", "/tests")
        ended = await self._container.run(
            f"rm -f {_LOGS}/reward.* && chmod +x /tests/test.sh && /tests/test.sh",
            verifier.timeout_sec,
            user=verifier.user,
            environment=task.tests_environment,
        )
        if ended.reason != "finished":
            raise RolloutFailed(
                f"tests/test.sh was ended by the limit: {ended.reason} "
                f"({verifier.timeout_sec:g} s, {OUTPUT_BYTES // MIB} MiB of output)"
            )
        found = await self._container.run(
            f"cat {_LOGS}/reward.json 2>/dev/null || cat {_LOGS}/reward.txt", _PROBE_S, user="root"
        )
        if not found.ok:
            raise RolloutFailed(f"tests/test.sh wrote no reward; its output:\n{ended.for_model()}")
        parts = rewards_from(found.output)
        return Result(parts, parts.get("reward", sum(parts.values())))


def is_argument(text: str) -> bool:
    """Linux passes it to a program as one argument."""
    try:
        data = text.encode()
    except UnicodeEncodeError:  # half of a pair of surrogates, from JSON
        return False
    return b"\0" not in data and len(data) < _LARGEST_ARGUMENT_BYTES


def rewards_from(text: str) -> dict[str, float]:
    """The rewards in `reward.txt` or `reward.json`: a number, or numbers by name. Raises
    `RolloutFailed`: it holds something else."""
    try:
        if text.lstrip().startswith("{"):
            return _REWARDS.validate_json(text)
        return _REWARDS.validate_python({"reward": float(text)})
    except ValueError as error:
        raise RolloutFailed(
            f"tests/test.sh wrote the reward {text.strip()!r}; expected numbers"
        ) from error
