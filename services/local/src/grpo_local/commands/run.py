"""`grpo-run`: inference server and trainer, from start to end."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_core.deadline import Deadline
from grpo_core.errors import GrpoError
from grpo_local.commands.run_settings import TRAINERS_RESTART_INTERVAL, RunSettings
from grpo_local.mode_flags import HandOff
from grpo_local.process.health import HealthProbe
from grpo_local.process.launch import timed
from grpo_local.process.processes import ManagedProcess
from grpo_local.process.signals import StopRequest, StopRequested
from grpo_local.process.stack import Service, Stack
from grpo_local.report.growing_file import GrowingFile
from grpo_local.screen import Screen
from grpo_local.services import module, weights_socket_path

EXIT_FAILED = 1
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
_POLL_S = 0.05


def run_together(settings: RunSettings, trainer_flags: Sequence[str], screen: Screen) -> int:
    """Returns the trainer's exit status (128 + n where signal n ended it); 1 where it was not the
    trainer that failed, 128 + n after signal n before it was there."""
    with (
        StopRequest() as stop_request,
        tempfile.TemporaryDirectory(prefix="grpo-") as temporary,
        HealthProbe() as probe,
        Stack(settings.log_dir, stop_request, grace_s=settings.stop_grace_s) as stack,
    ):
        try:
            hand_off = hand_off_of(settings, Path(temporary))
            hand_off.make_directories()
            timed(screen, server_of(settings, hand_off, probe), stack.start, "starting", "ready")
            trainer = trainer_of(settings, hand_off, trainer_flags)
            return Training(stack, stop_request, screen, settings).run(trainer)
        except StopRequested as stopped:
            screen.failure(f"{stopped} before the trainer was started")
            return stopped.exit_status
        except GrpoError as error:
            screen.failure(f"failed ({type(error).__name__}): {error}")
            return EXIT_FAILED


@dataclass(frozen=True)
class Training:
    """The time in which the trainer runs. What it says is shown, beside being kept in its log."""

    stack: Stack
    stop_request: StopRequest
    screen: Screen
    settings: RunSettings

    def run(self, trainer: Service) -> int:
        """Returns the trainer's exit status. Raises `ProcessFailed` where the server failed."""
        log = GrowingFile(self.settings.log_dir / f"{trainer.name}.log")

        def show() -> None:
            self.screen.lines(log.new_lines())

        try:
            code = self.stack.join([trainer], show)[trainer.name]
        except StopRequested:
            code = self._end(self.stack.process(trainer.name))
            show()
        return code if code >= 0 else 128 - code

    def _end(self, trainer: ManagedProcess) -> int:
        """Pass the signal on and let it finish; a second signal ends the patience."""
        trainer.signal(self.stop_request.received[0])
        grace = Deadline(self.settings.stop_grace_s)
        while (code := trainer.exit_code) is None:
            if self.stop_request.is_urgent or grace.has_passed:
                return EXIT_FAILED
            time.sleep(_POLL_S)
        return code


def hand_off_of(settings: RunSettings, temporary: Path) -> HandOff:
    return HandOff(
        options=settings,
        restart_every_steps=settings.vllm_restart_interval or TRAINERS_RESTART_INTERVAL,
        target_modules=tuple(settings.lora_target_modules or ()),
        redis_url=settings.redis_url.get_secret_value(),
        run_id=settings.run_id,
        save_path=settings.save_path,
        weights_socket=weights_socket_path(temporary),
        bridge_config=settings.log_dir / "vllm_bridge_config.json",
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
        name="trainer",
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
