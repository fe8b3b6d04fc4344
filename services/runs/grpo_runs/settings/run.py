"""Options of `grpo-run` and `grpo-demo`: the tree of all services' options, and those of starting
them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, SecretStr, field_validator

from grpo_core.cpu import CPU
from grpo_core.listening import in_url
from grpo_core.redis.keys import is_run_id
from grpo_core.security import plain, usable_token
from grpo_core.settings import (
    Command,
    CommandSettings,
    CommaSeparated,
    Given,
    Mistake,
    Shown,
    mistakes_of,
)
from grpo_core.settings.machine import (
    MADE_HERE,
    TINY,
    cannot_listen,
    not_writable,
    unusable_model,
)
from grpo_core.tree.environment import EnvironmentOptions
from grpo_core.tree.environment_values import AGENT
from grpo_core.tree.objectives import resolved
from grpo_core.tree.run_api import RunApiSettings
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
from grpo_core.tree.server import ServerSettings
from grpo_core.tree.trainer_command import CommandLine
from grpo_core.tree.weights import ModeName
from grpo_runs.defaults import BY_TASK, SIZE_NAMES, RunSizes, name_of_task, sizes_for
from grpo_runs.models import A_MODEL
from grpo_runs.modes import MODES, Mode
from grpo_runs.notify import unusable_target
from grpo_runs.run_directory import RUNS, RunDirectory, unusable
from grpo_runs.settings.tables import (
    ALIASES,
    API_KEYS,
    DEFAULTS,
    GROUPS,
    NEEDS_TASK,
    OF_ONE_SERVER,
    OF_PAIR,
    OF_SERVICES,
    OWN,
    OWN_MEANING,
    SETS_ITSELF,
)
from grpo_runs.views import Places, environment_values, server_values, trainer_values

DEMO_FILE = Path(__file__).with_name("demo.yaml")
GPU_CONTROL = Path("/dev/nvidiactl")
"""Exists if the NVIDIA driver is loaded."""
LOOPBACK = "127.0.0.1"
EVERY_ADDRESS = ("0.0.0.0", "::")
_HIDDEN = re.compile(r"^ *# (?:server: )?([\w.-]+)(?:: --([\w.-]+)|:)? \*\*\*$", re.MULTILINE)
"""A line of config.yaml for an option with a secret; the second name is an option of vLLM."""
_OWN_SECRETS = ("run-api-token", "vllm-api-key", "api-key")


def each_once(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


def half_the_cores() -> int:
    """Server and trainer compute at the same time, so each gets half."""
    return max(1, CPU.cores // 2)


class ServerHere(CommandSettings):
    """Of commands that start an inference server on this machine."""

    eager: Annotated[bool | None, Shown(default="on; on a GPU off")] = Field(
        None,
        description="Start the server sooner, without compilation and CUDA graphs. With --no-eager,"
        " the server starts later but samples faster, which saves time in long runs",
    )

    device: str

    @property
    def on_gpu(self) -> bool:
        """All services use the same device."""
        return GPU_CONTROL.exists() if self.device == "auto" else self.device.startswith("cuda")

    @property
    def starts_eager(self) -> bool:
        return self.eager if self.eager is not None else not self.on_gpu


OF_FORMER_RELEASES = frozenset(
    {
        *("fused-step", "head-kernel", "model-deadline-s"),
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


class RunSettings(CommandLine, EnvironmentOptions, ServerSettings, RunApiSettings, ServerHere):
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

    model: str = Field(min_length=1, description=f"Model: {A_MODEL}")
    task: Annotated[CommaSeparated[str], AfterValidator(each_once)] = Field(  # type: ignore[assignment]
        (),
        description="Task: arithmetic (one-digit sums), gsm8k or math (both need --data), your own "
        "reward (my.py:reward) or task (my.py:MyTask), or several of them, separated by commas. "
        "Each task gets its own environment",
    )
    mode: ModeName = Field(
        "shared_vllm",
        description="Weight-sync mode, which decides how the server gets new weights. shared_vllm: "
        "trainer and server share one copy in memory. lora_only: the running server "
        "loads each new adapter. lora_restart: the engine restarts with each new "
        "adapter. none: the running server loads each new model",
    )
    servers: int = Field(
        1,
        ge=1,
        description="Number of inference servers on this machine. Several servers share the cores "
        "of --compute-threads. If one ends, the run goes on with the others. Several servers need "
        "a CPU, and a mode other than shared_vllm",
    )
    run_dir: Annotated[Path | None, Shown(default="runs/<UTC time>-<seed>")] = Field(
        None, description="New or empty directory for the files of the run"
    )
    resume: Annotated[str | None, Shown(default="none; without --task: auto, as of grpo")] = Field(  # type: ignore[assignment]
        None,
        description="Resume the run in this directory, for example runs/latest. Command-line "
        "options override the directory's config.yaml. To continue a run that has finished, "
        "raise --steps",
    )
    report: bool = Field(
        True, description="Write report.html, a page to read the rollouts of the run"
    )
    watch: Annotated[bool | None, Shown(default="on at a terminal, else off")] = Field(
        None,
        description="Serve a page that shows the run while it trains, and open it in a browser if "
        "one is at hand; else print its address",
    )
    kv_cache_mib: Annotated[
        int | None, Shown(default="64; gsm8k: 256; on a GPU what --gpu-memory-utilization leaves")
    ] = Field(None, ge=1, description="Size of the server's KV cache, in MiB")
    step_deadline_s: Annotated[
        float | None,
        Shown(default="300; pretrained models: 1800; 180 more if the engine restarts"),
    ] = Field(
        None,
        gt=0,
        description="The run fails if no training step ends within this number of seconds",
    )
    server_deadline_s: Annotated[
        float | None, Shown(default="600; pretrained models, and without --task: 1800")
    ] = Field(None, gt=0, description="Seconds to wait for the inference server to start")
    start_deadline_s: Annotated[float | None, Shown(default="300; pretrained models: 600")] = Field(  # type: ignore[assignment]
        None,
        gt=0,
        description="Seconds to wait for run-api, the trainer and each environment to start",
    )
    stop_grace_s: float = Field(  # type: ignore[assignment]
        120.0,
        gt=0,
        description="Without --task: seconds to wait for each process to stop before it is killed",
    )
    compute_threads: Annotated[int, Shown(default="half the cores")] = Field(
        default_factory=half_the_cores,
        ge=1,
        description="Number of CPU threads that the server computes with; several servers share "
        "them. The trainer uses the same number",
    )
    run_api_token: SecretStr | None = Field(
        None,
        description="Access token that clients must send to run-api and to the inference server",
    )
    log_dir: Path = Field(
        Path("logs"),
        description="Without --task: directory for vllm-server.log and trainer.log",
    )
    server_flags: str = Field(
        "",
        description="More options for the inference server, in one string, for example "
        "--server-flags='--max-num-seqs 64'",
    )
    on_end: Annotated[str | None, Shown(metavar="COMMAND")] = Field(
        None,
        min_length=1,
        description="Command to run when the run has completed, failed or been stopped. It gets "
        "JSON on its standard input, and the same facts in variables such as GRPO_STATE and "
        "GRPO_TEXT. An http(s) URL gets the JSON in a POST request",
    )
    on_alert: Annotated[str | None, Shown(metavar="COMMAND")] = Field(
        None,
        min_length=1,
        description="The same for each alert, for example if no training step ends for 15 minutes",
    )
    server_options: tuple[str, ...] = ()
    """Options of vLLM."""

    _usable_token = field_validator("run_api_token")(usable_token)

    @field_validator("task")
    @classmethod
    def _is_not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("expected at least one value")
        return value

    @field_validator("server_flags")
    @classmethod
    def _shell_words(cls, value: str) -> str:
        try:
            shlex.split(value)
        except ValueError as error:
            raise ValueError(
                f"cannot split the value into words as a shell does ({error}); check its quotes"
            ) from None
        return value

    @classmethod
    def prepare_file(cls, content: dict[str, Any]) -> dict[str, Any]:
        return content

    @classmethod
    def drop_unused(cls, given: dict[str, Given], environment: Mapping[str, str]) -> Iterator[str]:
        if "task" in given:  # variables such as REDIS_URL are about another run
            for name in (*SETS_ITSELF, *API_KEYS):
                if name in given and given[name].name in environment:
                    del given[name]
        mode = given.setdefault("mode", Given("shared_vllm", "--mode"))
        if str(mode.value) in MODES:
            yield from CommandLine.drop_unused(given, environment)

    @property
    def starts_all(self) -> bool:
        """Whether all services are started here, and not only server and trainer."""
        return bool(self.task)

    @property
    def starts_teacher(self) -> bool:
        """Whether the run starts the server of its teacher."""
        return self.starts_all and self.teacher_model is not None and self.teacher_url is None

    @property
    def resumed(self) -> Path | None:
        """The directory of the run that goes on; None for a new one."""
        return Path(self.resume) if self.starts_all and self.resume else None

    @property
    def weight_mode(self) -> Mode:
        mode = MODES[self.mode]
        restarts = mode.restarts_engine or (self.mode == "none" and self.publish == "restart")
        return replace(mode, restarts_engine=restarts)

    @property
    def weights_dtype(self) -> str:
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if self.on_gpu else "float32"

    @property
    def evaluates_every(self) -> int:
        """Steps between evaluations; 0: none. By default before and after the run."""
        return self.eval_every if "eval_every" in self.model_fields_set else self.sizes.steps

    @property
    def vllm_words(self) -> list[str]:
        """Options of vLLM."""
        return [*shlex.split(self.server_flags), *self.server_options]

    @property
    def may_start_redis(self) -> bool:
        return "redis_url" not in self.model_fields_set

    @property
    def server_ports(self) -> range:
        """Of the servers of a run whose run-api runs already."""
        return range(self.port, self.port + self.servers)

    @property
    def server_url(self) -> str:
        """Of the first server, for clients on this host."""
        return self.url_of(self.port)

    def url_of(self, port: int) -> str:
        host = LOOPBACK if self.host in EVERY_ADDRESS else self.host
        return f"http://{in_url(host)}:{port}"

    @property
    def server_threads(self) -> int:
        return max(1, self.compute_threads // self.servers)

    @cached_property
    def sizes(self) -> RunSizes:
        """The options whose default depends on others."""
        return self._sizes_of(self.task)

    def _sizes_of(self, tasks: Sequence[str]) -> RunSizes:
        given = {name: getattr(self, name) for name in self.model_fields_set & {*SIZE_NAMES}}
        return sizes_for(
            tasks,
            self.weight_mode,
            is_tiny=self.model == TINY,
            on_gpu=self.on_gpu,
            given={name: value for name, value in given.items() if value is not None},
        )

    def completion_limit(self, task: str) -> int | None:
        """Of one task's completions, in tokens; None for the task's own limit."""
        return self.sizes.max_completion_tokens or self._sizes_of([task]).max_completion_tokens

    def given(self, service: str) -> dict[str, Any]:
        """The options of this service that the user has given, by field."""
        names = self.model_fields_set & VIEWS[service].model_fields.keys()
        names -= {name.removeprefix(f"{service}.") for name in OWN_MEANING}
        names -= {"world_size"} | ({"resume"} if self.starts_all else set())
        return {name: getattr(self, name) for name in names}

    def resolved(self) -> dict[str, Any]:
        """What was given, and what follows from it. Without the directories, as this configuration
        can be used for another run, and without --on-end and --on-alert, which may hold secrets."""
        own = OWN | self.model_fields_set
        own -= (OF_PAIR if self.starts_all else {*NEEDS_TASK}) - self.model_fields_set
        values = {name: getattr(self, name) for name in type(self).model_fields if name in own}
        if self.starts_all:
            values |= {name: getattr(self.sizes, name) for name in SIZE_NAMES}
            values |= {"dtype": self.weights_dtype, "eager": self.starts_eager}
            if not self.weight_mode.trains_adapter:
                del values["lora_target_modules"]
            else:
                values["lora_target_modules"] = tuple(self.sizes.lora_target_modules) or None
            if self.weight_mode.shares_memory or self.weight_mode.loads_adapters:
                del values["vllm_restart_interval"]
        for name in ("run_dir", "resume", "on_end", "on_alert"):
            values.pop(name, None)
        return {
            name: value
            for name, value in values.items()
            if value not in (None, "", ()) or (value == "" and name in self.model_fields_set)
        }

    def mistakes(self) -> Iterator[Mistake]:
        yield from self._mistakes_here()
        yield from self._mistakes_of_services(at_start=False)

    def _mistakes_here(self) -> Iterator[Mistake]:
        prog = self.command.prog
        if self.world_size != 1:
            yield Mistake("world_size", f"{prog} starts one trainer process; omit it")
        yield from self._mistakes_of_servers()
        if not self.starts_all:
            if self.port == self.health_port:
                yield Mistake(
                    None, f"--port and --health-port are both {self.port}; change one of them"
                )
            for name in type(self).model_fields:
                if name not in self.model_fields_set:
                    continue
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
        sizes = self.sizes
        sequences = sizes.batch_size * sizes.gradient_accumulation_steps
        each = self.agent_sequences if AGENT in self.task else 1
        if each > 1 and sequences % (self.group_size * each):
            yield Mistake(
                "agent_sequences",
                f"a group of --group-size {self.group_size} has {self.group_size * each} "
                f"sequences, which do not divide the {sequences} of a step (--batch-size "
                f"{sizes.batch_size} x --gradient-accumulation-steps "
                f"{sizes.gradient_accumulation_steps}); choose numbers that do",
            )
        elif sequences % self.group_size:
            yield Mistake(
                "group_size",
                f"{self.group_size} does not divide the {sequences} sequences of a "
                f"step (--batch-size {sizes.batch_size} x --gradient-accumulation-steps "
                f"{sizes.gradient_accumulation_steps}); choose a group size that divides them",
            )
        if sizes.max_model_len < sizes.seq_len:
            yield Mistake(
                "max_model_len",
                f"{sizes.max_model_len} is less than --seq-len {sizes.seq_len}, so "
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
        elif step >= self.sizes.steps:
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
        places = Places.not_yet_known(self)
        yield from self._mistakes_of_view(TRAINER, trainer_values(self, places), at_start)
        yield from self._mistakes_of_view(SERVER, server_values(self, places), False)
        for task in self.task:
            values = environment_values(self, places, task)
            yield from self._mistakes_of_view(ENVIRONMENT, values, at_start, task)

    def _mistakes_of_view(
        self, service: str, values: Mapping[str, Any], at_start: bool, task: str | None = None
    ) -> Iterator[Mistake]:
        view = VIEWS[service]
        has_code = task not in BY_TASK or "sandbox" in values or ":" in values.get("curriculum", "")
        if at_start and task is not None and has_code:
            from grpo_env.settings import EnvServerSettings as view
        for field, message in mistakes_of(view, values, at_start):
            is_ours = field in type(self).model_fields
            yield (
                Mistake(field, message)
                if is_ours
                else Mistake(None, f"{service}: {field}: {message}" if field else message)
            )


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
