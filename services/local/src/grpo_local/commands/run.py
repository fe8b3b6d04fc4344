"""`grpo-run`: inference server and trainer, from start to end."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from grpo_core.errors import GrpoError
from grpo_core.process.managed import ManagedProcess, ProcessFailed
from grpo_core.weights import bridge_config
from grpo_local.modes import HandOff
from grpo_local.process.health import HealthProbe
from grpo_local.process.signals import StopRequest, StopRequested
from grpo_local.process.stack import Service, Stack, start_on_screen
from grpo_local.report.metrics_file import GrowingFile
from grpo_local.screen import EXIT_FAILED, Screen
from grpo_local.services import module, weights_socket_path
from grpo_local.settings import TRAINERS_RESTART_INTERVAL, RunSettings

TRAINER = "trainer"
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}


def run_together(settings: RunSettings, trainer_flags: Sequence[str], screen: Screen) -> int:
    """Returns the trainer's exit status, 128 + n if signal n ended it; 1 if something else failed,
    128 + n after signal n before the trainer was started."""
    with (
        StopRequest() as stop_request,
        tempfile.TemporaryDirectory(prefix="grpo-") as temporary,
        HealthProbe() as probe,
        Stack(settings.log_dir, stop_request, grace_s=settings.stop_grace_s) as stack,
    ):
        try:
            hand_off = hand_off_of(settings, Path(temporary))
            hand_off.make_directories()
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
            code = stack.join([trainer_of(settings, hand_off, trainer_flags)], show_log)[TRAINER]
        except StopRequested:
            code = _pass_on(stop_request, stack.process(TRAINER), settings.stop_grace_s)
            show_log()
        except GrpoError as error:
            return screen.failed(error)
        return code if code >= 0 else 128 - code


def _pass_on(stop_request: StopRequest, trainer: ManagedProcess, grace_s: float) -> int:
    """Pass the stop signal on and wait for the trainer's end, at most until a second signal."""
    trainer.signal(stop_request.received[0])
    try:
        return trainer.wait(grace_s, hurry=lambda: stop_request.is_urgent)
    except ProcessFailed:
        return EXIT_FAILED


def hand_off_of(settings: RunSettings, temporary: Path) -> HandOff:
    return HandOff(
        options=settings,
        restart_every_steps=settings.vllm_restart_interval or TRAINERS_RESTART_INTERVAL,
        target_modules=tuple(settings.lora_target_modules or ()),
        redis_url=settings.redis_url.get_secret_value(),
        run_id=settings.run_id,
        save_path=settings.save_path,
        weights_socket=weights_socket_path(temporary),
        bridge_config=settings.log_dir / bridge_config.FILE_NAME,
    )


def server_of(settings: RunSettings, hand_off: HandOff, probe: HealthProbe) -> Service:
    health = settings.health_port
    return Service(
        name="vllm-server",
        command=module(
            "grpo_vllm",
            *("--model", settings.model),
            *("--host", settings.host),
            *("--port", settings.port),
            *(() if health is None else ("--health-port", health)),
            *hand_off.server_flags(),
            *settings.server_words,
        ),
        healthy=lambda: probe.answers(settings.server_url),
        deadline_s=settings.server_deadline_s,
        environment=UNBUFFERED | hand_off.environment(),
    )


def trainer_of(settings: RunSettings, hand_off: HandOff, flags: Sequence[str]) -> Service:
    return Service(
        name=TRAINER,
        command=module(
            "grpo_trainer",
            *("--model-name", settings.model),
            *("--atropos-url", settings.atropos_url),
            *("--vllm-url", settings.server_url),
            *hand_off.trainer_flags(),
            *flags,
        ),
        healthy=lambda: True,
        deadline_s=settings.server_deadline_s,
        environment=UNBUFFERED | hand_off.environment(),
        may_finish=True,
    )
