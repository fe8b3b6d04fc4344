"""`grpo-eval`: evaluates a model, and the one to compare it with, on the test items of tasks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from grpo_core.clients.service import ServiceClient
from grpo_core.errors import GrpoError
from grpo_core.evaluation.results import EvalResult, read_results, save
from grpo_core.evaluation.tables import compare, comparison_lines, table_lines
from grpo_core.gpu import VISIBLE_GPUS, visible_gpu
from grpo_core.listening import LOOPBACK
from grpo_core.process import describe_exit
from grpo_core.security import plain
from grpo_core.settings.machine import MADE_HERE
from grpo_core.temporary import temporary_directory
from grpo_core.tree.sections import ENVIRONMENT, SERVER, VIEWS, given_words, url_variables
from grpo_runs.models import EvaluatedModel, adapter_flags, by_server
from grpo_runs.process.health import HealthProbe
from grpo_runs.process.ports import free_port
from grpo_runs.process.stack import Service, Stack, StopRequest, StopRequested, start_on_screen
from grpo_runs.report.summary import counted
from grpo_runs.run_directory import RunDirectory
from grpo_runs.screen import Screen
from grpo_runs.services import MODULES, NO_COMPILER, child_environment, make_model, module
from grpo_runs.settings.evaluate import EvalSettings
from grpo_runs.settings.views import secret_variables, url
from grpo_runs.watch.followed_file import FollowedFile
from grpo_runs.watch.news import ServiceNews

ADAPTER_DEADLINE_S = 300.0
BASELINE = "baseline"
MODELS = ("model", "baseline", "base_model")
"""Options that name a model."""
MAKES_ITS_DATA = frozenset({"arithmetic"})
"""Tasks without a data set. The default of other tasks may be on the hub."""
_PROG = "env-server: "
"""Begins the line in which env-server names its failure."""

PROGRESS = "evaluation.progress"
"""An event in the log of env-server."""
_KEPT = ("task", "temperature", "duration_s", "versions", "left_out")
_FIELD = re.compile(r"(done|items|left_s)=(\d+)")

Results = dict[EvaluatedModel, dict[str, EvalResult]]
"""By model and task."""


class EvaluationFailed(GrpoError):
    """`env-server TASK evaluate` failed, or wrote no results. The message names the log."""


def evaluate_models(settings: EvalSettings, screen: Screen) -> int:
    """Returns the exit status: 0, 1 after a failure, 128 + n after signal n."""
    with StopRequest() as stop_request:
        try:
            settings = _with_models_made(settings, screen, stop_request)
            model, baseline = settings.evaluated(), settings.compared_with()
            models = [baseline, model] if baseline else [model]
            results: Results = {}
            for served, group in by_server(models).items():
                results |= _evaluated(settings, served, group, screen, stop_request)
            for task, after in results[model].items():
                if baseline and (before := results[baseline].get(task)):
                    lift = compare(before, after, settings.seed)
                    screen.lines(["", *comparison_lines(lift)], "bold")
            screen.lines(["", f"results: {settings.output}"])
        except StopRequested as stopped:
            screen.failure(f"{stopped}; every process of this evaluation has ended")
            return stopped.exit_status
        except GrpoError as error:
            return screen.failed(error)
    return 0


def _with_models_made(
    settings: EvalSettings, screen: Screen, stop_request: StopRequest
) -> EvalSettings:
    """With the directories of models that are made here in place of their names."""
    words = {name: getattr(settings, name) for name in MODELS}
    made: dict[str, str] = {}
    for word in {word for word in words.values() if word in MADE_HERE}:
        with Stack(settings.logs, stop_request) as stack:
            made[word] = make_model(stack, screen, word)
    changed = {name: made[word] for name, word in words.items() if word in made}
    return settings.model_copy(update=changed) if changed else settings


def _evaluated(
    settings: EvalSettings,
    served: str,
    models: Sequence[EvaluatedModel],
    screen: Screen,
    stop_request: StopRequest,
) -> Results:
    """The results of models that one server serves, one after the other."""
    token = plain(settings.vllm_api_key)
    port = free_port()
    news = ServiceNews(screen, settings.logs, RunDirectory(settings.output))
    with HealthProbe(token) as probe, Stack(settings.logs, stop_request, news.watch) as stack:
        server = inference_server(settings, probe, port, served, adapter_flags(models))
        start_on_screen(stack, [server], screen)
        results: Results = {model: {} for model in models}
        for model in models:
            if model.adapter:
                _load(model.adapter, url(port), token)
            for task in settings.task:
                for result, page in _results_of(task, model, url(port), settings, stack, screen):
                    results[model][result.task] = result
                    label = "" if model == settings.evaluated() else BASELINE
                    answers = save(result, settings.output, label).with_suffix(".html")
                    answers.write_bytes(page)
                    screen.lines(["", *table_lines(result), f"answers: {answers}"])
        with screen.activity("stopping the server"):
            stack.stop()
        news.look()
    return results


def inference_server(
    settings: EvalSettings, probe: HealthProbe, port: int, model: str, flags: Sequence[str]
) -> Service:
    """Serves the model that answers. Args: flags: for the adapters"""
    return Service(
        name="vllm-server",
        role="samples completions from the policy",
        command=module(
            MODULES[SERVER],
            *given_words(VIEWS[SERVER], settings.server(model)),
            *("--host", LOOPBACK, "--port", port, "--health-port", free_port()),
            *("--redis-url", "none"),
            *flags,
            *settings.engine_words(settings.served_length, settings.served_kv_cache_mib),
            *settings.server_options,
        ),
        healthy=lambda: probe.answers(url(port)),
        deadline_s=settings.server_deadline_s,
        deadline_option="--server-deadline-s",
        environment=child_environment(settings.compute_threads, model)
        | (NO_COMPILER if settings.starts_eager else {})
        | _variables(settings),
    )


def _variables(settings: EvalSettings) -> dict[str, str]:
    """For the server: its key, which other users could read on a command line, and its GPU."""
    _, colon, number = settings.device.partition(":")
    variables = secret_variables(vllm_api_key=settings.vllm_api_key)
    option = f"--device {settings.device}"
    return variables | ({VISIBLE_GPUS: visible_gpu(int(number), option)} if colon else {})


def _load(adapter: Path, server_url: str, token: str | None) -> None:
    """From now on, the server samples with the adapter.

    Raises:
        GrpoError: the server refuses the adapter, or does not answer.
    """
    deadline_s = ADAPTER_DEADLINE_S
    with ServiceClient("vllm-server", server_url, deadline_s, deadline_s, token) as server:
        body = {"adapter_path": str(adapter)}
        server.send("POST", "/lora/load", repeat_lost_answers=False, json=body)


def _results_of(
    task: str,
    model: EvaluatedModel,
    server_url: str,
    settings: EvalSettings,
    stack: Stack,
    screen: Screen,
) -> list[tuple[EvalResult, bytes]]:
    """One result and the page of its answers per task, since a task may be a mixture of several."""
    with temporary_directory() as temporary:
        output = temporary / "eval.jsonl"
        job = evaluation_job(task, model, server_url, output, settings)
        log = settings.logs / f"{job.name}.log"
        written = log.stat().st_size if log.exists() else 0
        progress = partial(_show_progress, FollowedFile(log, offset=written), screen)
        with screen.activity(f"evaluating {model.name} on {task}: {_plan(settings)}"):
            status = stack.join([job], progress)[job.name]
        if status != 0:
            raise EvaluationFailed(f"{_why(log, written, status)}; see {log}")
        found = read_results(output)
        pages = [page.read_bytes() for page in sorted(output.with_suffix("").glob("*.html"))]
    if not found:
        raise EvaluationFailed(f"env-server {task} evaluate wrote no results; see {log}")
    named = (_named(result, model, settings) for result in found)
    return [*zip(named, pages, strict=True)]


def _show_progress(log: FollowedFile, screen: Screen) -> None:
    """Show how far `env-server` is, as new lines of its log tell."""
    for line in log.new_lines():
        if PROGRESS in line:
            of = {name: int(number) for name, number in _FIELD.findall(line)}
            screen.line(f"  {of['done']} of {of['items']} items, ~{of['left_s']} s left", "dim")


def evaluation_job(
    task: str, model: EvaluatedModel, server_url: str, output: Path, settings: EvalSettings
) -> Service:
    """`env-server TASK evaluate`, which ends by itself."""
    values = settings.environment(task, model.served) | {"inference_url": server_url}
    data = settings.data
    needs_no_hub = Path(data).exists() if data else task in MAKES_ITS_DATA
    return Service(
        name="evaluate",
        command=module(
            *(MODULES[ENVIRONMENT], task, "evaluate"),
            *given_words(VIEWS[ENVIRONMENT], values),
            *("--eval-output", output),
        ),
        environment=child_environment(1, model.served, offline=needs_no_hub)
        | url_variables(VIEWS[ENVIRONMENT], values)
        | _variables(settings),
        may_finish=True,
    )


def _plan(settings: EvalSettings) -> str:
    how = "greedy" if settings.greedy else f"temperature {settings.sampling_temperature:g}"
    items, answers = counted(settings.items, "item"), counted(settings.answer_count, "answer")
    return f"at most {items}, {answers} each, {how}"


def _why(log: Path, written: int, status: int) -> str:
    """The failure as env-server names it, or its exit status."""
    lines = log.read_bytes()[written:].decode(errors="replace").splitlines()
    named = [line for line in lines if line.startswith(_PROG)]
    return named[-1] if named else f"env-server ended with {describe_exit(status)}"


def _named(result: EvalResult, model: EvaluatedModel, settings: EvalSettings) -> EvalResult:
    """With the name of the model, and with the metrics of `--ks`."""
    kept = {name: getattr(result, name) for name in _KEPT}
    ks, seed = settings.ks, settings.seed
    return EvalResult.of(result.items, **kept, model=model.name, ks=ks, seed=seed)
