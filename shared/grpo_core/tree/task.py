"""Options of `env-server` for its task: data, rewards, agents and evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from grpo_core.settings import Shown
from grpo_core.tree.environment_values import (
    UNIFORM,
    Arguments,
    Columns,
    Mixture,
    Weights,
    rule_name,
)


class DataOptions(BaseModel):
    """Which prompts are sampled."""

    data: Annotated[str | None, Shown(default="by task; gsm8k: openai/gsm8k from the hub")] = Field(
        None,
        min_length=1,
        description="Data set: a file (JSON lines, CSV, Parquet or Arrow), a directory that "
        "contains train.jsonl, or an id on the Hugging Face hub",
    )
    data_config: Annotated[str | None, Shown(default="by task; gsm8k: main")] = Field(
        None, description="Name of the data set's configuration on the Hugging Face hub"
    )
    columns: Annotated[Columns, Shown(metavar="NAME=COLUMN,...")] = Field(
        default_factory=dict,
        description="Names of columns: the task's name and the data set's, for example "
        "prompt=instruction",
    )
    system_prompt: Annotated[str | None, Shown(default="the task's")] = Field(
        None, description="System message of every prompt. An empty text removes the task's own"
    )
    template_args: Annotated[Arguments, Shown(metavar="NAME=VALUE,...")] = Field(
        default_factory=dict,
        description="Arguments of the chat template, for example enable_thinking=false for Qwen3. "
        "JSON is accepted too",
    )
    task_args: Annotated[Arguments, Shown(metavar="NAME=VALUE,...")] = Field(
        default_factory=dict,
        description="Arguments of the task, for example level=2 for arithmetic. JSON is accepted "
        "too",
    )
    mixture: Annotated[Mixture, Shown(metavar="TASK=WEIGHT,...")] = Field(
        (),
        description="Tasks of a mixture and their shares of the groups, for example "
        "gsm8k=0.7,arithmetic=0.3. In a YAML file, each task can have its own data and columns",
    )
    curriculum: Annotated[str, AfterValidator(rule_name)] = Field(
        UNIFORM,
        description="How often each item of a task is drawn. uniform: all items in turn. "
        "learnable: most often those that the model solves sometimes, by the scores of their "
        "recent groups. my.py:sampler: by the weights that your function returns",
    )
    curriculum_dir: Path | None = Field(
        None,
        description="Directory that keeps what --curriculum has measured, so that a restarted "
        "environment goes on from it. Each environment needs a directory of its own",
    )
    seed: int = Field(0, description="Random seed for the order of the prompts")


class RewardOptions(BaseModel):
    """How answers are graded."""

    reward_weights: Annotated[
        Weights, Shown(default="by task; 1 for each part", metavar="PART=WEIGHT,...")
    ] = Field(
        default_factory=dict,
        description="Weights of the parts of the reward. Every task also has the penalties length, "
        "repetition and overlong (-1 to 0), which count if they have a weight",
    )
    reward_deadline_s: float = Field(
        30.0, gt=0.0, description="Seconds that the reward of one answer may take"
    )
    reward_workers: int = Field(
        16,
        ge=0,
        le=256,
        description="Number of processes in which rewards and tools run, side by side. With 0 they "
        "run in threads of env-server: without a hard deadline, but with all state of the task",
    )
    max_failed_rewards: float = Field(
        0.5,
        ge=0.0,
        le=1.0,
        description="Largest share (0 to 1) of recent groups whose reward or rollout may fail. "
        "Above it, the environment stops with the error RewardsFail or RolloutsFail",
    )
    mask_too_long_completions: bool = Field(
        False,
        description="Give completions that reached the token limit an advantage of 0",
    )
    sandbox: Annotated[str, Shown(metavar="KIND")] = Field(
        "auto",
        pattern=r"^(auto|bubblewrap|docker|docker:.+|none)$",
        description="Where rewards and tools run code that the model wrote, if they use "
        "grpo_env.sandbox: bubblewrap (auto is the same), docker or docker:IMAGE in a container, "
        "none: on this machine, without protection",
    )


class AgentOptions(BaseModel):
    """Of the task `agent`, whose rollouts a program or a function of the user conducts."""

    agent_command: Annotated[str | None, Shown(metavar="COMMAND")] = Field(
        None,
        min_length=1,
        description="Task agent: the program of one rollout, for example 'python my_agent.py'. It "
        "finds the policy through OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, or the same of "
        "ANTHROPIC, and its row as JSON in GRPO_ROW and on its standard input. Other name: "
        "--command",
    )
    agent: Annotated[str | None, Shown(metavar="FILE:FUNCTION")] = Field(
        None,
        min_length=1,
        description="Task agent: a function agent(row, client) instead of a program, for example "
        "my.py:agent. It may be async",
    )
    reward: Annotated[str | None, Shown(metavar="FILE:FUNCTION")] = Field(
        None,
        min_length=1,
        description="Task agent: the reward, for example my.py:reward, or a task whose data and "
        "reward are used, for example gsm8k",
    )
    agent_calls: int = Field(
        32,
        ge=1,
        description="Largest number of calls of the policy in one rollout. After them, the rollout "
        "is graded with what the policy said",
    )
    agent_tokens: Annotated[int | None, Shown(default="no limit")] = Field(
        None,
        ge=1,
        description="Largest number of tokens that the policy samples in one rollout, in all calls",
    )
    agent_deadline_s: float = Field(
        300.0,
        gt=0.0,
        description="Seconds that one rollout may take. Then the program is ended, and the rollout "
        "has failed",
    )
    agent_rollouts: int = Field(
        16,
        ge=1,
        description="Largest number of agents that run at the same time",
    )
    agent_sequences: int = Field(
        1,
        ge=1,
        description="Largest number of token sequences of one rollout. A call that does not "
        "continue an earlier conversation begins a sequence. A group has this number of sequences "
        "for each rollout",
    )


class EvaluationOptions(BaseModel):
    """How the policy is evaluated."""

    eval_every: int = Field(
        0,
        ge=0,
        description="Evaluate after this number of training steps, and before the first and after "
        "the last one. 0: never",
    )
    eval_data: Annotated[
        str | None, Shown(default="test.jsonl beside train.jsonl, or --held-out")
    ] = Field(None, min_length=1, description="Data set for evaluation, in the forms of --data")
    held_out: Annotated[float | None, Shown(default="0.1; arithmetic: 0.2")] = Field(
        None,
        ge=0.0,
        lt=1.0,
        description="Share (0 to 1) of the rows that is kept for evaluation, if there is no other "
        "data for it",
    )
    eval_items: int = Field(
        200, ge=1, description="Largest number of items in an evaluation, chosen by --seed"
    )
    eval_samples: int = Field(
        8, ge=1, description="Number of completions for each item in an evaluation"
    )
    eval_temperature: Annotated[float | None, Shown(default="--temperature")] = Field(
        None,
        ge=0.0,
        allow_inf_nan=False,
        description="Sampling temperature in an evaluation. 0: the most likely tokens, with one "
        "completion for each item",
    )
    eval_handling: Annotated[
        Literal["STOP_TRAIN", "LIMIT_TRAIN", "NONE"],
        BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value),
    ] = Field(
        "STOP_TRAIN",
        description="Sampling for training during an evaluation. STOP_TRAIN: none, so that one "
        "policy version is evaluated. LIMIT_TRAIN: with fewer groups. NONE: as usual",
    )
    eval_limit_ratio: float = Field(
        0.5,
        ge=0.0,
        le=1.0,
        description="Share (0 to 1) of --max-concurrent-groups that LIMIT_TRAIN leaves to training",
    )
    eval_requests: int = Field(
        64, ge=1, description="Largest number of items that are evaluated at the same time"
    )
    eval_output: Annotated[Path | None, Shown(default="none; evaluate: eval.jsonl")] = Field(
        None, description="File that gets one JSON line for each evaluation"
    )
