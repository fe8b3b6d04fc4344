"""Command line, variables and health check of each service of a local run."""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

from grpo_core.cpu import CPU
from grpo_core.errors import GrpoError
from grpo_core.gpu import VISIBLE_GPUS
from grpo_core.listening import LOOPBACK
from grpo_core.process import describe_exit, killed_with_parent
from grpo_core.redis.server import REDIS_DEADLINE_S, answers_ping, disk_bytes, redis_command
from grpo_core.redis.url import WITHOUT_REDIS, redis_password
from grpo_core.service_url import hide_passwords
from grpo_core.settings import without_secrets
from grpo_core.settings.command import URL_VARIABLES
from grpo_core.settings.machine import SMOLLM2, does_not_answer
from grpo_core.sockets import no_proxy
from grpo_core.temporary import temporary_directory
from grpo_core.tree.environment import PROG
from grpo_core.tree.sections import (
    ENVIRONMENT,
    RUN_API,
    SERVER,
    TRAINER,
    VIEWS,
    given_words,
    url_variables,
)
from grpo_runs.defaults import BY_TASK, name_of_task
from grpo_runs.process.health import HealthProbe
from grpo_runs.process.ports import free_port
from grpo_runs.process.stack import Service, Stack, start_on_screen
from grpo_runs.run_directory import MODEL_JOB, RUNS, RunDirectory
from grpo_runs.screen import Screen
from grpo_runs.settings.run import RunSettings
from grpo_runs.settings.views import (
    Places,
    environment_values,
    run_api_values,
    secret_variables,
    server_values,
    teacher_values,
    token_variables,
    trainer_values,
    url,
    vllm_words,
)

MODULES = {TRAINER: "grpo_trainer", SERVER: "grpo_vllm", ENVIRONMENT: "grpo_env"}
"""The module that runs each service."""
TEACHER = "teacher"
SAMPLES = "samples completions from the policy"
TRAINS = "trains the policy and publishes its weights"
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
"""The last lines of a process that dies must reach its log."""
NO_COMPILER = {"TORCHDYNAMO_DISABLE": "1"}
"""Without it the first request takes seconds, since vLLM compiles one function in eager mode too.
"""
THREADS = "OMP_NUM_THREADS"
LONGEST_SOCKET_PATH = 107  # bytes: sun_path of unix(7) without its final zero
MODEL_PATH_FILE = "model-path"


class SocketPathTooLong(GrpoError):
    """The path of the temporary directory is too long for a unix socket in it."""


def services_of(settings: RunSettings, places: Places, probe: HealthProbe) -> list[Service]:
    """All but Redis. Of a run whose run-api and environments run already: servers and trainer."""
    servers = [server_of(settings, places, probe, number) for number in range(settings.servers)]
    trainer = trainer_of(settings, places, probe)
    if places.run is None:
        return [*servers, trainer]
    return [
        _run_api(settings, places, probe, places.run),
        *servers,
        *([_teacher(settings, places, probe)] if settings.starts_teacher else []),
        trainer,
        *(_environment(settings, places, probe, task) for task in settings.task),
    ]


def redis_of(run: RunDirectory, port: int) -> Service:
    password = redis_password(run.redis)
    return Service(
        name="redis",
        role="stores the queue of scored groups",
        command=redis_command(port, run.redis, password=password),
        healthy=lambda: answers_ping(port, password),
        deadline_s=REDIS_DEADLINE_S,
    )


def _run_api(
    settings: RunSettings, places: Places, probe: HealthProbe, run: RunDirectory
) -> Service:
    values = {"redis_disk_bytes": disk_bytes(run.redis)} | run_api_values(settings, places)
    return Service(
        name="run-api",
        role="queues scored groups and hands out batches",
        command=module("grpo_api", *given_words(VIEWS[RUN_API], values)),
        healthy=lambda: probe.answers(places.run_api_url),
        deadline_s=settings.start_deadline_s,
        deadline_option="--start-deadline-s",
        environment=child_environment(threads=1) | places.environment | token_variables(settings),
    )


def server_of(
    settings: RunSettings, places: Places, probe: HealthProbe, number: int = 0
) -> Service:
    values, server_url = server_values(settings, places, number), places.server_urls[number]
    words = [*vllm_words(settings, places.model), *values.pop("engine_arguments")]
    if places.run is not None:
        values = {"health_port": free_port()} | values
        healthy = partial(probe.answers, server_url)
        variables = _variables_of_server(settings, places.model) | token_variables(settings)
    else:
        healthy = partial(probe.responds, server_url)
        threads = {THREADS: str(settings.server_threads)} if settings.servers > 1 else {}
        keys = {"run_api_token": settings.run_api_token, "vllm_api_key": settings.api_key}
        variables = UNBUFFERED | threads | secret_variables(**keys)
    return Service(
        name=places.server_names[number],
        role=SAMPLES,
        command=module(MODULES[SERVER], *given_words(VIEWS[SERVER], values), *words),
        healthy=healthy,
        deadline_s=settings.server_deadline_s,
        deadline_option="--server-deadline-s",
        environment=variables | places.environment,
        group=SERVER,
    )


def _teacher(settings: RunSettings, places: Places, probe: HealthProbe) -> Service:
    values = teacher_values(settings, places)
    words = [*vllm_words(settings, values["model"]), *settings.vllm_words]
    return Service(
        name=TEACHER,
        role="scores the policy's tokens",
        command=module(MODULES[SERVER], *given_words(VIEWS[SERVER], values), *words),
        healthy=lambda: probe.answers(url(places.teacher_port)),
        deadline_s=settings.server_deadline_s,
        deadline_option="--server-deadline-s",
        environment=_variables_of_server(settings, values["model"])
        | {"REDIS_URL": WITHOUT_REDIS}
        | token_variables(settings),
    )


def _variables_of_server(settings: RunSettings, model: str) -> dict[str, str]:
    """Variables of a server, if all services are started here."""
    compiler = NO_COMPILER if settings.starts_eager else {}
    return child_environment(settings.server_threads, model) | compiler


def trainer_of(settings: RunSettings, places: Places, probe: HealthProbe) -> Service:
    values = trainer_values(settings, places)
    if places.run is not None:
        variables = child_environment(settings.rank_threads, places.model)
        variables |= token_variables(settings)
        deadline_s = settings.start_deadline_s
    else:  # it runs as a job, which has no deadline
        deadline_s = math.inf
        keys = {"run_api_token": settings.run_api_token, "vllm_api_key": settings.vllm_api_key}
        variables = UNBUFFERED | secret_variables(**keys)
    return Service(
        name=TRAINER,
        role=f"{TRAINS}, on {count} ranks" if (count := settings.processes) > 1 else TRAINS,
        command=module(MODULES[TRAINER], *given_words(VIEWS[TRAINER], values)),
        healthy=lambda: probe.trainer_is_registered(places.run_api_url),
        deadline_s=deadline_s,
        deadline_option="--start-deadline-s",
        environment=variables
        | places.environment
        | _weights_address(settings, places)
        | _gpus_of_ranks(settings)
        | url_variables(VIEWS[TRAINER], values),
        may_finish=True,
        # In some modes grpo starts a server itself if nothing listens yet.
        may_start=lambda: _accept_connections(places.run_api_url, *places.server_urls),
    )


def _environment(settings: RunSettings, places: Places, probe: HealthProbe, task: str) -> Service:
    name, values = name_of_task(task), environment_values(settings, places, task)
    data = settings.data
    is_on_hub = task != "arithmetic" and data and not Path(data).expanduser().exists()
    return Service(
        name=environment_name(settings, task),
        role=f"asks for completions of {name} and grades them",
        command=module(
            MODULES[ENVIRONMENT], task, "serve", *given_words(VIEWS[ENVIRONMENT], values)
        ),
        healthy=lambda: probe.has_environment(places.run_api_url, name),
        deadline_s=settings.start_deadline_s,
        deadline_option="--start-deadline-s",
        environment=child_environment(1, places.model, offline=not is_on_hub)
        | url_variables(VIEWS[ENVIRONMENT], values)
        | token_variables(settings)
        | secret_variables(teacher_api_key=values.get("teacher_api_key")),
        may_finish=True,  # after the last batch
        may_start=lambda: _accept_connections(places.run_api_url),
    )


def environment_name(settings: RunSettings, task: str) -> str:
    return "environment" if len(settings.task) == 1 else f"environment-{name_of_task(task)}"


def _weights_address(settings: RunSettings, places: Places) -> dict[str, str]:
    """Variables of the trainer: where it serves its weights to several servers. Those of a run
    whose services are all started here see its disk too."""
    names = ("MASTER_ADDR", "MASTER_PORT")
    if places.run is None:
        return {name: os.environ[name] for name in names if name in os.environ}
    if settings.servers == 1:
        return {}
    return dict(zip(names, (LOOPBACK, str(free_port())), strict=True))


def _gpus_of_ranks(settings: RunSettings) -> dict[str, str]:
    """Several ranks take the GPUs behind those of the server."""
    if settings.ranks == 1 or not settings.on_gpu:
        return {}
    first, end = settings.server_workers, settings.server_workers + settings.ranks
    visible = os.environ.get(VISIBLE_GPUS) or ",".join(map(str, range(end)))
    return {VISIBLE_GPUS: ",".join(visible.split(",")[first:end])}


def model_job(model: str, path_file: Path, threads: int) -> Service:
    """A job that makes a model, and writes the path of its directory into `path_file`.

    Args:
        model: SMOLLM2, or the tiny model
    """
    flags = [f"--{SMOLLM2}"] if model == SMOLLM2 else []
    named = f"{SMOLLM2}, which takes 25 s," if flags else "the tiny model"
    return Service(
        name=MODEL_JOB,
        role=f"makes {named} or finds it in the cache",
        command=module("grpo_tiny_model", *flags, "--path-file", path_file),
        environment=child_environment(threads),
        may_finish=True,
    )


def make_weights_directory(settings: RunSettings, places: Places) -> None:
    """Call it before the server starts, which requires its weights directory to exist."""
    if not settings.weight_mode.shares_memory:
        places.weights_directory.mkdir(parents=True, exist_ok=True)


def make_model(stack: Stack, screen: Screen, model: str) -> str:
    """The directory of SMOLLM2 or the tiny model.

    Raises:
        ProcessFailed: the model could not be made.
        StopRequested: a stop signal arrived.
    """
    with temporary_directory() as temporary:
        path_file = temporary / MODEL_PATH_FILE
        job = model_job(model, path_file, CPU.cores)
        start_on_screen(stack, [job], screen)
        return path_file.read_text().strip()


def command_lines(settings: RunSettings) -> list[str]:
    """One line per service, without secrets. Starts nothing."""
    return [_shown(service) for service in _not_started(settings)]


def problem_of_tasks(settings: RunSettings) -> str | None:
    """Why an environment would refuse the user's code or data; None if it would not."""
    for service in _not_started(settings):
        _, _, module_name, task, *_ = service.command
        if module_name != MODULES[ENVIRONMENT] or (task in BY_TASK and settings.data is None):
            continue
        try:
            ended = subprocess.run(
                [*service.command, "--dry-run"],
                env=os.environ | service.environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=service.deadline_s,
                preexec_fn=killed_with_parent,
            )
        except subprocess.TimeoutExpired:
            return (
                f"{task}: not loaded within {service.deadline_s:g} s; if its data only needs more "
                "time, raise --start-deadline-s"
            )
        if ended.returncode:
            said = ended.stderr.partition(f"{PROG}: ")[2] or ended.stderr
            return said or f"{task}: loading it ended with {describe_exit(ended.returncode)}"
    return None


def _not_started(settings: RunSettings) -> list[Service]:
    run, redis = None, ""
    if settings.starts_all:
        run = RunDirectory(settings.resumed or settings.run_dir or RUNS / "new")
        redis = redis_url(free_port())
    places = Places.of(settings, settings.model, Path("weights.sock"), run, redis, free_port)
    with HealthProbe() as probe:
        return services_of(settings, places, probe)


def _shown(service: Service) -> str:
    urls = [
        f"{name}={hide_passwords(service.environment[name])}"
        for name in (*URL_VARIABLES.values(), THREADS, VISIBLE_GPUS)
        if name in service.environment
    ]
    return shlex.join([*urls, *without_secrets(service.command)[0]])


def _accept_connections(*urls: str) -> bool:
    return not any(map(does_not_answer, urls))


def redis_url(port: int) -> str:
    return f"redis://{LOOPBACK}:{port}/0"


def weights_socket_path(directory: Path) -> Path:
    """Raises `SocketPathTooLong` if the kernel would refuse the path."""
    path = directory / "weights.sock"
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
        raise SocketPathTooLong(
            f"{path} is longer than {LONGEST_SOCKET_PATH} bytes; set TMPDIR to a shorter path"
        )
    return path


def child_environment(
    threads: int, model: str | None = None, offline: bool = True
) -> dict[str, str]:
    """Variables of a child process, besides those of the runner.

    Args:
        offline: a child that loads a local `model` needs nothing else from the hub
    """
    environment = {THREADS: str(threads)} | UNBUFFERED | no_proxy(os.environ)
    if offline and model is not None and Path(model).is_dir():
        # Otherwise each start asks the hub about a model that the hub does not have.
        environment["HF_HUB_OFFLINE"] = "1"
    return environment


def module(name: str, *arguments: str | int | float | Path) -> list[str]:
    """The command that runs a module with this interpreter."""
    return [sys.executable, "-m", name, *(str(argument) for argument in arguments)]
