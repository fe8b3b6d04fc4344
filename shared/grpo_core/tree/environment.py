"""Options of the `env-server` command."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, Field, field_validator

from grpo_core.settings import (
    Command,
    CommandSettings,
    CommaSeparated,
    InferenceUrl,
    Mistake,
    Shown,
)
from grpo_core.settings.command import URL_VARIABLES
from grpo_core.settings.machine import failed, missing_data, missing_tokenizer, not_writable
from grpo_core.tree.common import ClientOptions, MetricsOptions
from grpo_core.tree.environment_values import (
    AGENT,
    AGENT_OPTIONS,
    ALIASES,
    MIXTURE,
    PYTHON,
    REFUSED,
    UNIFORM,
    WITHOUT_EFFECT,
    one_policy,
)
from grpo_core.tree.task import AgentOptions, DataOptions, EvaluationOptions, RewardOptions
from grpo_core.tree.teacher import TeacherOptions
from grpo_core.wire.fields import Weight

PROG = "env-server"
Action = Literal["serve", "process", "evaluate", "check"]
ACTIONS: tuple[str, ...] = get_args(Action)


def _no_program(command: str, is_here: bool) -> str | None:
    """What is wrong with a command. is_here: its program is on this machine"""
    try:
        words = shlex.split(command)
    except ValueError as error:
        return f"cannot split the value into words as a shell does ({error}); check its quotes"
    if not words or (is_here and words[0] not in PYTHON and shutil.which(words[0]) is None):
        return f"there is no program {''.join(words[:1])!r}"
    script = words[1] if words[0] in PYTHON and words[1:] else ""
    if is_here and script.endswith(".py") and not Path(script).exists():
        return f"no such file: {script}"
    return None


class SamplingOptions(BaseModel):
    """How groups are sampled."""

    group_size: int = Field(8, ge=1, description="Number of completions sampled for each prompt")
    temperature: float = Field(1.0, gt=0.0, allow_inf_nan=False, description="Sampling temperature")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Sample from the most likely tokens that together have this probability. With "
        "this option, --top-k or --repetition-penalty, the trainer needs --recompute-logprobs. "
        "Evaluations sample without all three",
    )
    top_k: int = Field(
        0, ge=0, description="Sample from this number of most likely tokens. 0: from all tokens"
    )
    repetition_penalty: float = Field(
        1.0,
        ge=0.01,
        le=100,
        description="Above 1, tokens that the prompt or the completion contains get less likely",
    )
    seq_len: int = Field(
        2048,
        ge=2,
        description="A group is dropped if one of its sequences has this number of tokens or more. "
        "A smaller --seq-len of the trainer takes precedence",
    )
    max_completion_tokens: Annotated[int | None, Shown(default="by task; gsm8k: 512")] = Field(
        None,
        ge=1,
        description="Longest completion, in tokens. A completion that reaches this length is cut "
        "off and then graded",
    )
    start_completion_tokens: Annotated[int | None, Shown(default="--max-completion-tokens")] = (
        Field(
            None,
            ge=1,
            description="Longest completion at the first training step, in tokens. It grows "
            "linearly to --max-completion-tokens at the last step",
        )
    )
    max_concurrent_groups: int = Field(
        32,
        ge=1,
        le=64,
        description="Largest number of groups that all environments of a run together sample at the"
        " same time",
    )
    max_batches_offpolicy: int = Field(
        3,
        ge=1,
        description="Largest number of batches that are queued or being sampled. More batches keep "
        "the trainer busier, fewer batches keep the data fresher",
    )
    drop_equal_scores: Annotated[bool | None, Shown(default="on; off with --teacher-url")] = Field(
        None,
        description="Drop groups whose scores are all equal, because the advantages of such a group"
        " are zero. Rewards of dropped groups still count in the reported mean reward",
    )


class DeadlineOptions(BaseModel):
    """How long this environment waits."""

    start_deadline_s: float = Field(
        1800.0, gt=0.0, description="Seconds to wait for an inference server to become healthy"
    )
    request_deadline_s: float = Field(
        300.0,
        gt=0.0,
        description="Seconds to wait for all completions of one prompt, retries included",
    )
    run_api_deadline_s: float = Field(
        120.0,
        gt=0.0,
        description="Seconds to retry requests while run-api is unreachable",
    )
    trainer_deadline_s: float = Field(
        1800.0,
        gt=0.0,
        description="Seconds to wait until a trainer registers. If this environment can queue no "
        "more groups, also the seconds to wait until the trainer takes a batch",
    )
    next_run_deadline_s: float = Field(
        0.0,
        ge=0.0,
        description="Seconds to wait for a trainer to continue the run, if the run has already "
        "finished when this environment starts",
    )


class EnvironmentOptions(
    CommandSettings,
    DeadlineOptions,
    EvaluationOptions,
    AgentOptions,
    RewardOptions,
    DataOptions,
    SamplingOptions,
    TeacherOptions,
    MetricsOptions,
    ClientOptions,
):
    """Environment: samples groups for a task, grades them and submits them to run-api.

    TASK is arithmetic, gsm8k, math or mixture; a function or a class in a file (my.py:reward) or in
    a module (package.module:MyTask); an entry point of the group grpo.tasks; an environment
    (verifiers:ENVIRONMENT, openenv:ENVIRONMENT, textarena:GAME, harbor:DIRECTORY); or
    agent, with an agent of your own.

    ACTION is serve: sample groups until the run has finished; process: sample --steps groups
    without a trainer and write them to --output; evaluate: sample held-out items and print the
    results; check: grade eight answers and print a table.

    Names of options of Atropos environments are accepted too, for example --env.group_size and
    --openai.base_url."""

    command: ClassVar[Command] = Command(
        prog=PROG,
        positional=("task", "action"),
        variables=URL_VARIABLES,
        groups={
            "Model": ("model", "tokenizer", "inference_url", "vllm_api_key", "server_type"),
            "Sampling": tuple(SamplingOptions.model_fields),
            "Teacher": tuple(TeacherOptions.model_fields),
            "Data": tuple(DataOptions.model_fields),
            "Reward": tuple(RewardOptions.model_fields),
            "Agent": tuple(AgentOptions.model_fields),
            "Evaluation": tuple(EvaluationOptions.model_fields),
            "Actions process and check": ("output", "answers"),
            "Run": (
                "run_api_url",
                "run_api_token",
                "steps",
                "wandb_name",
                "weight",
                "min_batch_allocation",
                "untrained_dir",
            ),
            "Deadlines": tuple(DeadlineOptions.model_fields),
            "Logging": ("log_level", "ready_file", "metrics_port", "metrics_host", "use_wandb"),
        },
        examples=(
            "env-server arithmetic serve --model ./model --group-size 8",
            "env-server check my.py:reward --data rows.jsonl --answers answers.txt",
            "env-server my.py:reward serve --data rows.jsonl --model ./model",
            "env-server gsm8k serve --model Qwen/Qwen2.5-0.5B-Instruct --data ./gsm8k --dry-run",
        ),
        aliases=ALIASES,
        without_effect=WITHOUT_EFFECT,
        refused=REFUSED,
    )

    task: str = Field(
        min_length=1, description="Name of the task, or its file or module, as described above"
    )
    action: Action = Field("serve", description="What to do with the task, as described above")
    steps: Annotated[int, Shown(default="-1, which means the trainer's last step")] = Field(
        -1, ge=-1, description="Number of the training step after which this environment stops"
    )
    tokenizer: Annotated[str | None, Shown(default="the model's")] = Field(
        None, description="Tokenizer: a directory or an id on the Hugging Face hub"
    )
    untrained_dir: Path | None = Field(
        None,
        description="Directory that keeps some rollouts of groups that were dropped for their "
        "equal scores, and of evaluations. Each environment needs a directory of its own",
    )
    output: Annotated[Path, Shown(default="runs/rollouts.jsonl")] = Field(
        Path("runs/rollouts.jsonl"),
        description="File of the action process, with one group per line. A page for a browser is "
        "written beside it",
    )
    answers: Path | None = Field(
        None,
        description="File with answers for the action check, one per line. Without it, eight "
        "answers are sampled from the inference server",
    )
    wandb_name: Annotated[str | None, Shown(default="the task's name")] = Field(
        None, min_length=1, description="Name of this environment in metrics and in logs"
    )
    use_wandb: bool = Field(
        False,
        description="Log this environment's metrics to Weights & Biases, as a separate W&B run in "
        "the trainer's project and group",
    )
    weight: Weight = Field(
        1.0,
        description="Weight of this environment when the limit --max-concurrent-groups is divided "
        "among environments. -1: this environment takes no part in the division and may use the "
        "whole limit",
    )
    min_batch_allocation: float | None = Field(
        None,
        ge=0.0,
        le=1.0,
        allow_inf_nan=False,
        description="Minimum fraction (0 to 1) of every batch that must come from this "
        "environment. run-api delays a batch until the queue contains enough groups of this "
        "environment",
    )
    ready_file: Path | None = Field(
        None,
        description="File for a container's health check. The file exists while this environment "
        "runs",
    )
    inference_url: CommaSeparated[InferenceUrl] = Field(
        ("http://localhost:9001",),
        min_length=1,
        description="URL of the inference server. Several URLs, separated by commas, share the "
        "requests, and a server that is gone is skipped. Each address of a name is a server. "
        "During a run, other servers of the run are found through run-api. Mode shared_vllm allows "
        "only one URL",
    )
    model: Annotated[str | None, Shown(default="--tokenizer")] = Field(
        None,
        min_length=1,
        description="Model that the inference server serves: a directory, an id on the "
        "Hugging Face hub, smollm2 or tiny",
    )
    server_type: Literal["vllm"] = Field(
        "vllm",
        description="Type of the inference server. Only vllm returns the logprobs that training "
        "needs",
    )

    @field_validator("inference_url")
    @classmethod
    def _each_server_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(value))

    @field_validator("server_type", mode="before")
    @classmethod
    def _generates_with_logprobs(cls, value: Any) -> Any:
        if value != "vllm":
            raise ValueError(
                "expected the server type vllm, because training needs the logprob of every "
                "sampled token, which only /generate of vllm-api-server returns"
            )
        return value

    @classmethod
    def prepare_file(cls, content: dict[str, Any]) -> dict[str, Any]:
        servers = content.get("openai")
        return content | ({"openai": one_policy(servers)} if isinstance(servers, list) else {})

    def mistakes(self) -> Iterator[Mistake]:
        needs_tokenizer = self.action != "check" or self.answers is None
        if needs_tokenizer and not self.tokenizer_name:
            yield Mistake(None, "--model is required")
        if bool(self.mixture) != (self.task == MIXTURE):
            yield Mistake(
                "mixture",
                "the task mixture needs tasks and weights, for example gsm8k=0.7,arithmetic=0.3"
                if self.task == MIXTURE
                else "only the task mixture has this option; write `env-server mixture serve`",
            )
        yield from self._mistakes_of_agent()
        yield from self.teacher_mistakes()
        if self.group_size == 1 and self.drops_equal_scores:
            problem = "every group of 1 has equal scores; pass 2 or more, or --no-drop-equal-scores"
            yield Mistake("group_size", problem)
        if self.curriculum_dir and self.curriculum == UNIFORM:
            yield Mistake("curriculum_dir", "needs --curriculum learnable, or a function of yours")
        if (self.max_completion_tokens or 0) >= self.seq_len:
            yield Mistake(
                "max_completion_tokens",
                f"a prompt and {self.max_completion_tokens} completion tokens exceed --seq-len "
                f"{self.seq_len}; lower --max-completion-tokens or raise --seq-len",
            )

    def _mistakes_of_agent(self) -> Iterator[Mistake]:
        if self.task != AGENT:
            # A file of --dry-run names all options; their defaults are no mistake.
            defaults = type(self).model_fields
            for name in AGENT_OPTIONS:
                if getattr(self, name) != defaults[name].default:
                    yield Mistake(
                        name, "only the task agent has this option; write `env-server agent serve`"
                    )
            return
        if (self.agent_command is None) == (self.agent is None):
            ways = "either --command 'python my_agent.py' or --agent my.py:agent"
            yield Mistake(None, f"the task agent needs an agent: {ways}")
        if self.reward is None:
            yield Mistake(None, "the task agent needs --reward, for example my.py:reward")
        if self.reward == AGENT:
            yield Mistake("reward", "expected a reward, for example my.py:reward, or another task")
        if self.answers is not None:
            yield Mistake("answers", "the reward rates what the agent did; omit this option")
        if self.system_prompt is not None:
            yield Mistake("system_prompt", "the agent writes its own prompts; omit this option")
        if self.agent_command is not None:
            is_here = not self.sandbox.startswith("docker")
            if problem := _no_program(self.agent_command, is_here):
                yield Mistake("agent_command", problem)

    def start_mistakes(self) -> Iterator[Mistake]:
        named = "tokenizer" if self.tokenizer else "model"
        yield from failed(missing_tokenizer, **{named: self.tokenizer_name})
        yield from failed(missing_data, data=self.data, eval_data=self.eval_data)
        output = self.output if self.action == "process" else None
        files = {"output": output, "eval_output": self.eval_output, "ready_file": self.ready_file}
        directories = {name: path and path.parent for name, path in files.items()}
        directories |= {"curriculum_dir": self.curriculum_dir, "untrained_dir": self.untrained_dir}
        yield from failed(not_writable, **directories)
        if self.action == "serve":
            yield from self.port_mistakes()
        yield from self.teacher_prompt_mistakes()
        if self.answers and not self.answers.is_file():
            yield Mistake("answers", f"{self.answers}: no such file")
        if self.use_wandb and find_spec("wandb") is None:
            image = "build the image with ENVIRONMENT_EXTRAS=wandb"
            yield Mistake("use_wandb", f"needs the package wandb: pip install wandb, or {image}")

    @property
    def agent_arguments(self) -> dict[str, Any]:
        """Arguments of the task `agent`."""
        return {name: getattr(self, option) for option, name in AGENT_OPTIONS.items()}

    @property
    def drops_equal_scores(self) -> bool:
        given = self.drop_equal_scores
        return self.teacher_url is None if given is None else given

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer or self.model or ""
