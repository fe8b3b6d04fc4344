"""`grpo-run`: the inference server and the trainer of a run, from start to stop."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from grpo_core.errors import GrpoError
from grpo_core.process import ManagedProcess, ProcessFailed
from grpo_core.redis.server import LocalRedis
from grpo_core.redis.url import local_redis_directory
from grpo_core.settings.machine import SMOLLM2
from grpo_core.weights import bridge_config
from grpo_runs.models import default_max_model_len
from grpo_runs.modes import HandOff
from grpo_runs.process.health import HealthProbe
from grpo_runs.process.stack import Service, Stack, StopRequest, StopRequested, start_on_screen
from grpo_runs.report.steps import GrowingFile
from grpo_runs.screen import EXIT_FAILED, Screen
from grpo_runs.service_options import MODULES, SERVER, TRAINER, service_words
from grpo_runs.services import make_smollm2, module, weights_socket_path
from grpo_runs.settings import RunSettings

UNBUFFERED = {"PYTHONUNBUFFERED": "1"}


def run_together(settings: RunSettings, screen: Screen) -> int:
    """Returns the trainer's exit status, or 128 + n if signal n ended it. If the trainer was not
    started: 1 after a failure, 128 + n after signal n."""
    with (
        StopRequest() as stop_request,
        tempfile.TemporaryDirectory(prefix="grpo-") as temporary,
        HealthProbe() as probe,
        contextlib.ExitStack() as resources,
        Stack(settings.log_dir, stop_request, grace_s=settings.stop_grace_s) as stack,
    ):
        try:
            hand_off = settings.hand_off(
                weights_socket_path(Path(temporary)), settings.log_dir / bridge_config.FILE_NAME
            )
            hand_off.make_directories()
            if settings.model == SMOLLM2:
                model = make_smollm2(stack, screen, settings.server_deadline_s)
                settings = settings.model_copy(update={"model": model})
            if settings.may_start_redis:
                resources.enter_context(LocalRedis(local_redis_directory()))
            start_on_screen(stack, [server_of(settings, hand_off, probe)], screen)
        except StopRequested as stopped:
            screen.failure(f"{stopped} before the trainer was started")
            return stopped.exit_status
        except GrpoError as error:
            return screen.failed(error)
        log = GrowingFile(settings.log_dir / f"{TRAINER}.log")

        def show_log() -> None:
            screen.lines(log.new_lines())

        try:
            code = stack.join([trainer_of(settings, hand_off)], show_log)[TRAINER]
        except StopRequested:
            code = _pass_on(stop_request, stack.process(TRAINER), settings.stop_grace_s)
            show_log()
        except GrpoError as error:
            return screen.failed(error)
        return code if code >= 0 else 128 - code


def _pass_on(stop_request: StopRequest, trainer: ManagedProcess, grace_s: float) -> int:
    """Pass the stop signal on and wait for the trainer's end, or for a second signal."""
    trainer.signal(stop_request.received[0])
    try:
        return trainer.wait(grace_s, hurry=lambda: stop_request.is_urgent)
    except ProcessFailed:
        return EXIT_FAILED


def server_of(settings: RunSettings, hand_off: HandOff, probe: HealthProbe) -> Service:
    health = settings.health_port
    return Service(
        name="vllm-server",
        role="samples completions from the policy",
        command=module(
            MODULES[SERVER],
            *("--model", settings.model),
            *("--host", settings.host),
            *("--port", settings.port),
            *(() if health is None else ("--health-port", health)),
            *hand_off.server_flags(),
            *("--log-level", settings.log_level),
            *_dtype(settings),
            *("--gpu-memory-utilization", settings.gpu_memory_utilization),
            *("--max-model-len", settings.max_model_len or default_max_model_len(settings.model)),
            *settings.server_words,
            *service_words(settings.options_of(SERVER)),
        ),
        healthy=lambda: probe.responds(settings.server_url),
        deadline_s=settings.server_deadline_s,
        environment=UNBUFFERED | hand_off.environment(),
    )


def _dtype(settings: RunSettings) -> list[str]:
    """Empty by default, because GRPO_DTYPE may hold another one."""
    return [] if settings.dtype == "auto" else ["--dtype", settings.dtype]


def trainer_of(settings: RunSettings, hand_off: HandOff) -> Service:
    return Service(
        name=TRAINER,
        role="trains the policy and publishes its weights",
        command=module(
            MODULES[TRAINER],
            *("--model", settings.model),
            *("--run-api-url", settings.run_api_url),
            *("--inference-url", settings.server_url),
            *_dtype(settings),
            *hand_off.trainer_flags(),
            *("--log-level", settings.log_level),
            *service_words(settings.options_of(TRAINER)),
        ),
        healthy=lambda: True,
        deadline_s=settings.server_deadline_s,
        environment=UNBUFFERED | hand_off.environment(),
        may_finish=True,
    )
