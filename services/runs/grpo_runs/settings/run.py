"""`grpo-run` and `grpo-demo`: their commands, and checks of the options of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from grpo_core.redis.keys import is_run_id
from grpo_core.security import plain
from grpo_core.settings import Command, CommandSettings, Mistake
from grpo_core.settings.machine import (
    MADE_HERE,
    TO_BE_MADE,
    cannot_listen,
    not_writable,
    unusable_model,
)
from grpo_core.tree.environment_values import AGENT
from grpo_core.tree.objectives import resolved
from grpo_core.tree.sections import (
    ENVIRONMENT,
    LEFT_OUT,
    RUN_API,
    SERVER,
    SET_BY_LAUNCHER,
    TRAINER,
    VIEWS,
    service_of,
)
from grpo_runs.defaults import BY_TASK, name_of_task
from grpo_runs.notify import unusable_target
from grpo_runs.run_directory import RUNS, RunDirectory, unusable
from grpo_runs.settings.launch_options import (
    ALIASES,
    API_KEYS,
    DEFAULTS,
    GROUPS,
    NEEDS_TASK,
    OF_ONE_SERVER,
    OF_SERVICES,
    SETS_ITSELF,
    LaunchOptions,
)
from grpo_runs.settings.views import Places, environment_values, server_values, trainer_values

DEMO_FILE = Path(__file__).with_name("demo.yaml")
_HIDDEN = re.compile(r"^ *# (?:server: )?([\w.-]+)(?:: --([\w.-]+)|:)? \*\*\*$", re.MULTILINE)
"""A line of config.yaml for an option with a secret; the second name is an option of vLLM."""
_OWN_SECRETS = ("run-api-token", "vllm-api-key", "api-key")


OF_FORMER_RELEASES = frozenset(
    {
        *("fused-step", "head-kernel", "model-deadline-s", "run.model-deadline-s"),
        *("redis-appendfsync", "queue.redis-appendfsync"),
    }
)
"""Options that run files and the recorded configurations of runs may still have."""


def _command(prog: str, env_prefix: str, *examples: str, defaults: Mapping[str, str]) -> Command:
    refusal = f"{prog} sets this option itself; omit it"
    names = ["vllm-url", *(name.replace("_", "-") for name in SET_BY_LAUNCHER)]
    prefixes = ("", *(f"{service}." for service in VIEWS))
    return Command(
        prog=prog,
        env_prefix=env_prefix,
        groups=GROUPS,
        sections=True,
        defaults={**DEFAULTS, **defaults},
        brief=OF_SERVICES,
        examples=examples,
        aliases=ALIASES,
        refused={f"{prefix}{name}": refusal for prefix in prefixes for name in names}
        | {"memory-plan": "write grpo --memory-plan, which starts nothing"},
        without_effect=OF_FORMER_RELEASES,
        passes_on="server_options",
        passes_on_below=f"{SERVER}.",
        left_out=LEFT_OUT,
    )


class RunSettings(LaunchOptions):
    """Trains a model with GRPO on this machine. With --task, or a file that names one, grpo-run
    starts Redis, run-api, the inference server, the trainer and an environment for each task as
    local processes, and shows the progress. Without it, it starts the inference server and the
    trainer of a run whose run-api and environments run already; the exit status is then the
    trainer's.

    Every option of grpo, env-server, vllm-api-server and run-api is an option of the run too, under
    its own name, that of its section (--optim.lr) or that of its service (--trainer.lr). All other
    options of vLLM begin with --server., for example --server.block-size 32.

    FILE is a YAML or TOML file with these options, in sections or without. What is only named here
    is described by `grpo --help`, `env-server --help`, `vllm-api-server --help` or
    `run-api --help`."""

    command: ClassVar[Command] = _command(
        "grpo-run",
        "GRPO_RUN_",
        "grpo-run run.yaml",
        "grpo-run --model ./model --task my.py:reward --data rows.jsonl",
        "grpo-run --model ./model --redis-url redis://db:6379 --mode lora_only --dry-run",
        defaults={},
    )

    def mistakes(self) -> Iterator[Mistake]:
        yield from self._mistakes_here()
        yield from self._mistakes_of_services(at_start=False)

    def _mistakes_here(self) -> Iterator[Mistake]:
        prog = self.command.prog
        if self.world_size != 1:
            yield Mistake("world_size", f"{prog} starts the ranks: write --ranks, and omit it")
        yield from self._mistakes_of_servers()
        if not self.starts_all:
            if self.port == self.health_port:
                yield Mistake(None, f"--port and --health-port are both {self.port}; change one")
            given = (name for name in type(self).model_fields if name in self.model_fields_set)
            for name in given:
                if name in NEEDS_TASK or service_of(name) in (ENVIRONMENT, RUN_API):
                    yield Mistake(name, "needs --task, with which all services are started")
            return
        for name in SETS_ITSELF:
            if name in self.model_fields_set:
                yield Mistake(name, f"{prog} sets this option itself; omit it")
        for name in API_KEYS:
            if name in self.model_fields_set:
                yield Mistake(name, f"{prog} sets this option; write --run-api-token")
        if self.data is None and "gsm8k" in self.task:
            yield Mistake(
                None,
                "gsm8k needs --data (with make: DATA=): a directory with train.jsonl, one object "
                "with question and answer per line, or a data set on the hub such as openai/gsm8k",
            )
        yield from self._mistakes_of_teacher()
        names = [name_of_task(task) for task in self.task]
        if twice := next((name for name in names if names.count(name) > 1), None):
            yield Mistake("task", f"two tasks have the name {twice}")
        yield from self._mistakes_of_sizes()
        if self.resume is not None and self.run_dir is not None:
            yield Mistake("run_dir", "--resume already names the run's directory; omit this option")

    def _mistakes_of_teacher(self) -> Iterator[Mistake]:
        if self.starts_teacher and self.teacher_model in {*MADE_HERE} - {self.model}:
            yield Mistake("teacher_model", f"{self.teacher_model} needs the same --model")
        name = "teacher_model" if self.teacher_model is not None else "teacher_url"
        has_teacher = getattr(self, name) is not None
        learns = resolved(self.objective, {"distill_coef": self.distill_coef}).distill_coef > 0
        if has_teacher and not learns:
            yield Mistake(name, "has no effect without --objective distill or --distill-coef")
        elif learns and not has_teacher:
            needs = "distill_coef" if self.distill_coef else "objective"
            yield Mistake(needs, "needs a teacher: pass --teacher-model or --teacher-url")

    def _mistakes_of_servers(self) -> Iterator[Mistake]:
        nodes = self.num_inference_nodes
        if self.starts_all and nodes not in (0, self.servers):
            yield Mistake("num_inference_nodes", f"omit it, and write --servers {nodes}")
        if self.servers == 1:
            return
        for name in OF_ONE_SERVER:
            if name in self.model_fields_set:
                yield Mistake(name, f"is of one server; omit it with --servers {self.servers}")
        if self.weight_mode.shares_memory:
            yield Mistake(
                "servers",
                f"{self.servers}: in mode shared_vllm the trainer shares the memory of one server; "
                "choose --mode none, lora_only or lora_restart, or omit this option",
            )
        elif self.on_gpu:
            yield Mistake(
                "servers",
                f"{self.servers}: on GPUs, {self.command.prog} starts one server; start each "
                "further server with CUDA_VISIBLE_DEVICES and vllm-api-server, and the trainer "
                "with --num-inference-nodes (docs/how-to/several-servers.md)",
            )

    def _mistakes_of_sizes(self) -> Iterator[Mistake]:
        sequences = self.batch_size * self.gradient_accumulation_steps
        each = self.agent_sequences if AGENT in self.task else 1
        if each > 1 and sequences % (self.group_size * each):
            yield Mistake(
                "agent_sequences",
                f"a group of --group-size {self.group_size} has {self.group_size * each} "
                f"sequences, which do not divide the {sequences} of a step (--batch-size "
                f"{self.batch_size} x --gradient-accumulation-steps "
                f"{self.gradient_accumulation_steps}); choose numbers that do",
            )
        elif sequences % self.group_size:
            yield Mistake(
                "group_size",
                f"{self.group_size} does not divide the {sequences} sequences of a "
                f"step (--batch-size {self.batch_size} x --gradient-accumulation-steps "
                f"{self.gradient_accumulation_steps}); choose a group size that divides them",
            )
        if self.max_model_len and self.max_model_len < self.seq_len:
            yield Mistake(
                "max_model_len",
                f"{self.max_model_len} is less than --seq-len {self.seq_len}, so "
                "the server would refuse prompts; raise --max-model-len or lower --seq-len",
            )

    def start_mistakes(self) -> Iterator[Mistake]:
        yield from self._mistakes_of_machine()
        yield from self._mistakes_of_services(at_start=True)

    def _mistakes_of_machine(self) -> Iterator[Mistake]:
        for name in ("on_end", "on_alert"):
            target = getattr(self, name)
            if target is not None and (problem := unusable_target(target)):
                yield Mistake(name, problem)
        if problem := unusable_model(self.model):
            yield Mistake("model", problem)
        if self.starts_teacher and (problem := unusable_model(self.teacher_model or "")):
            yield Mistake("teacher_model", problem)
        if not self.starts_all:
            if problem := not_writable(self.log_dir):
                yield Mistake("log_dir", problem)
            for port in self.server_ports:
                if problem := cannot_listen(self.host, port):
                    yield Mistake("port", problem)
        elif self.resumed is not None:
            yield from self._mistakes_of_resumed(self.resumed)
        elif problem := not_writable(self.run_dir or RUNS):
            yield Mistake("run_dir", problem)
        elif self.run_dir is not None and (problem := unusable(self.run_dir, "--run-dir")):
            yield Mistake(None, problem)
        elif self.run_dir and not is_run_id(run_id := RunDirectory(self.run_dir).run_id):
            yield Mistake(
                "run_dir",
                f"the run's id would be {run_id!r}, but spaces and braces are not allowed; "
                "choose another directory name",
            )

    def _mistakes_of_resumed(self, resume: Path) -> Iterator[Mistake]:
        run = RunDirectory.of(resume)
        if not run.config.is_file():
            yield Mistake(
                "resume", f"{resume}: no {run.config.name} in it; name the directory of a run"
            )
            return
        yield from self._lacking_secrets(run)
        if run.is_in_use():
            yield Mistake(None, f"--resume {resume}: this run is still running; stop it first")
        step = run.newest_checkpoint_step()
        if step is None:
            yield Mistake(None, f"--resume {resume}: no checkpoint in it; start a new run instead")
        elif step >= self.steps:
            yield Mistake(
                None,
                f"--resume {resume}: all {step} steps are done; pass a larger --steps, for "
                f"example --steps {2 * step}. For its evaluation, run grpo-eval --model "
                f"{run.checkpoints / self.weight_mode.final_directory}; for its page, grpo-report "
                f"{resume}",
            )

    def _lacking_secrets(self, run: RunDirectory) -> Iterator[Mistake]:
        """Options of the resumed run whose values its config.yaml does not contain."""
        words = [word.partition("=")[0] for word in self.vllm_words]
        for name, of_vllm in _HIDDEN.findall(run.config.read_text()):
            is_own = not of_vllm and name in _OWN_SECRETS
            option = f"--{name}" if is_own else f"--server.{of_vllm or name}"
            is_given = plain(self.run_api_token) if is_own else f"--{of_vllm or name}" in words
            if not is_given:
                yield Mistake(
                    None,
                    f"--resume {self.resume}: the run had {option}, and {run.config.name} does not "
                    f"contain its value; pass {option} again",
                )

    def _mistakes_of_services(self, at_start: bool) -> Iterator[Mistake]:
        """What the services would refuse, in the options that they get."""
        model = TO_BE_MADE if self.model in MADE_HERE else self.model
        places = Places.of(self, model, run=RunDirectory(Path("run")) if self.starts_all else None)
        view = VIEWS[TRAINER] if at_start else None
        yield from self.mistakes_in(TRAINER, trainer_values(self, places), view)
        yield from self.mistakes_in(SERVER, server_values(self, places))
        for task in self.task:
            values = environment_values(self, places, task)
            view = _environment_view(task, values) if at_start else None
            yield from self.mistakes_in(ENVIRONMENT, values, view)


def _environment_view(task: str, values: Mapping[str, Any]) -> type[CommandSettings]:
    """Checks the user's code too, if there is some."""
    has_code = task not in BY_TASK or "sandbox" in values or ":" in values.get("curriculum", "")
    if not has_code:
        return VIEWS[ENVIRONMENT]
    from grpo_env.settings import EnvServerSettings

    return EnvServerSettings


class DemoSettings(RunSettings):
    """Trains a tiny model with GRPO on this machine and shows the progress: grpo-run with the file
    demo.yaml, which names the model and the task. grpo-demo needs no GPU, no container and no model
    hub. All options of grpo-run override the file."""

    command: ClassVar[Command] = _command(
        "grpo-demo",
        "GRPO_DEMO_",
        "grpo-demo --steps 20",
        "grpo-demo --task my.py:reward --data rows.jsonl",
        "grpo-demo --model ./model --task gsm8k --data ./gsm8k --dry-run",
        "grpo-demo --resume runs/latest --steps 500",
        defaults={"model": "tiny", "task": "arithmetic"},
    )
