"""`env-server TASK evaluate`: evaluates the served policy once."""

from __future__ import annotations

import sys
from pathlib import Path

from grpo_core.evaluation.files import save
from grpo_core.evaluation.table import table_lines
from grpo_core.security.bearer_token import plain
from grpo_env.assembly import TaskSet, open_engine, sampling_plan
from grpo_env.config.settings import EnvServerSettings
from grpo_env.evaluation.runner import Evaluation, evaluate
from grpo_env.inference.wait_for_servers import wait_for_servers
from grpo_env.rollout.chat_template import ChatTemplate

DEFAULT_OUTPUT = Path("eval.jsonl")


async def evaluate_once(
    settings: EnvServerSettings, tasks: TaskSet, template: ChatTemplate
) -> None:
    """Print a table for each task, and append the results to `--eval-output`.

    Raises:
        GrpoError: the evaluation cannot be done.
    """
    evaluation = Evaluation.of(settings)
    chosen = [(task, evaluation.chosen(task)) for task in tasks.tasks]
    output = settings.eval_output or DEFAULT_OUTPUT
    api_key = plain(settings.vllm_api_key)
    await wait_for_servers(settings.inference_url, settings.start_deadline_s, api_key)
    async with open_engine(settings, tasks, template) as engine:
        plan = sampling_plan(settings, tasks)
        for task, items in chosen:
            result = await evaluate(engine, task, items, evaluation, plan, settings.model)
            details = save(result, output, Path(settings.model or "").name)
            sys.stdout.write("\n".join(table_lines(result)) + "\n")
            sys.stdout.write(f"written to {output} and {details}\n")
            sys.stdout.flush()
