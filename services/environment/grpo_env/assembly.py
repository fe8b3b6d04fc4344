"""Builds what every action of `env-server` needs: the tasks, the servers and the rollout engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass

import structlog

from grpo_core.security import plain
from grpo_core.tree.environment_values import AGENT, UNIFORM, MixturePart
from grpo_env.inference.pool import InferencePool
from grpo_env.inference.waiting import wait_for_servers
from grpo_env.loading import TaskSpec, TaskUnusable, find_rule
from grpo_env.rollout.chat_template import ChatTemplate, load_template
from grpo_env.rollout.engine import RolloutEngine
from grpo_env.rollout.grader import Grader
from grpo_env.rollout.groups import Generate, SamplingPlan
from grpo_env.rollout.task_code import TaskCode
from grpo_env.rollout.teacher import Teacher, TeacherClient
from grpo_env.sandbox import use_sandbox
from grpo_env.settings import EnvServerSettings
from grpo_env.tasks import Task, TaskOptions
from grpo_env.tasks.item_stream import ItemStream
from grpo_env.tasks.items import training_items
from grpo_env.tasks.tools import tool_schemas

log = structlog.get_logger()


@dataclass(frozen=True)
class TaskSet:
    """The task of this environment, or the tasks of its mixture with their weights."""

    tasks: tuple[Task, ...]
    weights: tuple[float, ...]

    def training_stream(self, seed: int, curriculum: str = UNIFORM) -> ItemStream:
        """Draws items to train on, by the rule that `curriculum` names.

        Raises:
            DataUnusable, CurriculumUnusable: the data, or the rule.
        """
        items = [training_items(task) for task in self.tasks]
        parts = [*zip(items, self.weights, strict=True)]
        return ItemStream(parts, seed, find_rule(curriculum))

    @property
    def max_sequences(self) -> int:
        """Largest number of sequences of one rollout."""
        return max(task.max_sequences for task in self.tasks)


def _parts(settings: EnvServerSettings) -> Sequence[MixturePart]:
    return settings.mixture or (MixturePart(task=settings.task),)


def _spec(settings: EnvServerSettings, part: MixturePart) -> TaskSpec:
    """The part's own values, or those of the command line."""
    prompt, given = part.system_prompt, part.task_args or settings.task_args
    options = TaskOptions(
        seed=settings.seed,
        data=part.data or settings.data,
        data_config=part.data_config or settings.data_config,
        eval_data=part.eval_data or (None if part.data else settings.eval_data),
        columns=part.columns or settings.columns,
        system_prompt=settings.system_prompt if prompt is None else prompt,
        args=settings.agent_arguments | given if part.task == AGENT else given,
    )
    return TaskSpec(part.task, options, part.name, settings.held_out)


@contextmanager
def open_tasks(settings: EnvServerSettings) -> Iterator[TaskSet]:
    """Create the tasks and close them at the end.

    Raises:
        TaskUnusable: a task does not exist, or its code fails.
        DataUnusable, DatasetsMissing, GraderUnusable: what a task needs is missing.
    """
    use_sandbox(settings.sandbox)
    parts = _parts(settings)
    with ExitStack() as stack:
        tasks = []
        for part in parts:
            tasks.append(_spec(settings, part).make())
            stack.callback(tasks[-1].close)
        names = [task.name for task in tasks]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise TaskUnusable(
                f"several tasks have the name {', '.join(repeated)}; give each a `name` of its own"
            )
        yield TaskSet(tuple(tasks), tuple(part.weight for part in parts))


def open_template(settings: EnvServerSettings, tasks: TaskSet) -> ChatTemplate:
    """The chat template of the model, which shows the tasks' tools.

    Raises:
        TokenizerUnusable: there is none, or it leaves tools or their answers out.
        ToolUnusable: a tool has no schema.
    """
    template = load_template(settings.tokenizer_name, settings.template_args)
    for task in tasks.tasks:
        if task.tools:
            template.require_tools(task.name, tool_schemas(task.tools[:1])[0])
    return template


@asynccontextmanager
async def open_engine(
    settings: EnvServerSettings, tasks: TaskSet, template: ChatTemplate
) -> AsyncIterator[tuple[RolloutEngine, InferencePool]]:
    """The rollout engine, and the inference servers of `--inference-url` that it samples on, as
    soon as one is healthy and the teacher of `--teacher-url` answers.

    Raises:
        GrpoError: the errors of `wait_for_servers`, `TeacherClient.find_model` and
            `TeacherClient.require_same_tokenizer`.
    """
    urls, api_key = settings.inference_url, plain(settings.vllm_api_key)
    await wait_for_servers(urls, settings.start_deadline_s, api_key)
    # At one server: one request for each group, or for each rollout of a conversation.
    requests = max(settings.max_concurrent_groups, settings.eval_requests)
    if any(task.is_conversation or task.drives_itself for task in tasks.tasks):
        requests *= max(settings.group_size, settings.eval_samples)
    async with (
        InferencePool(
            urls, settings.request_deadline_s, requests, api_key, tokenizer=template.tokenizer
        ) as pool,
        _teacher(settings, template) as teacher,
    ):
        with engine_on(pool.generate, settings, template, teacher) as engine:
            yield engine, pool


@asynccontextmanager
async def _teacher(
    settings: EnvServerSettings, template: ChatTemplate
) -> AsyncIterator[Teacher | None]:
    """None without `--teacher-url`."""
    if settings.teacher_url is None:
        yield None
        return
    async with TeacherClient(
        settings.teacher_url,
        settings.teacher_model,
        settings.request_deadline_s,
        settings.max_concurrent_groups,
        plain(settings.teacher_api_key),
    ) as client:
        await client.find_model(settings.start_deadline_s)
        await client.require_same_tokenizer(template.tokenizer)
        log.info("teacher.ready", url=client.base_url, model=client.model)
        yield Teacher(client, template, settings.teacher_prompt)


@contextmanager
def engine_on(
    generate: Generate,
    settings: EnvServerSettings,
    template: ChatTemplate,
    teacher: Teacher | None = None,
) -> Iterator[RolloutEngine]:
    """The rollout engine on any source of completions."""
    with task_code(settings) as code:
        yield RolloutEngine(generate, template, Grader(settings.reward_weights, code), teacher)


def task_code(settings: EnvServerSettings) -> TaskCode:
    """Calls the code of the tasks, in other processes where it can."""
    specs = [asdict(_spec(settings, part)) for part in _parts(settings)]
    return TaskCode(settings.reward_deadline_s, settings.reward_workers, json.dumps(specs))


def sampling_plan(
    settings: EnvServerSettings,
    tasks: TaskSet,
    trainer_limit: int = -1,
    step: int = 1,
    steps: int = 1,
) -> SamplingPlan:
    """How to sample groups for training.

    Args:
        trainer_limit: the trainer's limit for a sequence, in tokens; below 1 if it is not known
        step, steps: as `SamplingPlan`
    """
    limit = settings.seq_len
    neutral = {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    chosen = ((name, getattr(settings, name)) for name in neutral)
    return SamplingPlan(
        group_size=settings.group_size,
        temperature=settings.temperature,
        reshaping={name: value for name, value in chosen if value != neutral[name]},
        max_token_length=min(limit, trainer_limit) if trainer_limit > 0 else limit,
        max_completion_tokens=settings.max_completion_tokens,
        start_completion_tokens=settings.start_completion_tokens,
        step=step,
        steps=steps,
        drop_equal_scores=settings.drops_equal_scores,
        max_sequences=tasks.max_sequences,
        mask_cut_off=settings.mask_too_long_completions,
    )
