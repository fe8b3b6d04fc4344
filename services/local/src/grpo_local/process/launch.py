"""Starts the services of a run in the order in which they need each other, and says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from grpo_local.mode_flags import HandOff
from grpo_local.process.ports import free_port
from grpo_local.process.stack import Service, Stack
from grpo_local.screen import Screen
from grpo_local.services import TINY_MODEL_PATH_FILE, ServiceFactory


@dataclass(frozen=True)
class Launch:
    factory: ServiceFactory
    stack: Stack
    screen: Screen

    def all_services(self, weights_socket: Path) -> HandOff:
        """Each on a port of its own.

        Raises:
            ProcessFailed: one of them did not become ready.
            StopRequested: a stop signal arrived.
        """
        factory = self.factory
        model = factory.settings.model or self._tiny_model()
        redis_port = free_port()
        self.start(factory.redis(redis_port))
        api_port = free_port()
        self.start(factory.run_api(api_port, redis_port))
        hand_off = factory.hand_off(redis_port, weights_socket)
        hand_off.make_directories()
        vllm_port = free_port()
        self.start(factory.vllm_server(vllm_port, model, hand_off))
        self.start(factory.trainer(model, api_port, vllm_port, hand_off))
        for task in factory.settings.task:
            self.start(factory.environment(task, model, api_port, vllm_port))
        return hand_off

    def _tiny_model(self) -> str:
        path_file = self.factory.run.path / TINY_MODEL_PATH_FILE
        service = self.factory.tiny_model(path_file)
        timed(self.screen, service, self.stack.run, "making", "made")
        return path_file.read_text().strip()

    def start(self, service: Service) -> None:
        timed(self.screen, service, self.stack.start, "starting", "ready")


def timed(
    screen: Screen, service: Service, act: Callable[[Service], float], doing: str, done: str
) -> None:
    """Say what is being waited for, and how long it took."""
    with screen.activity(f"{doing} {service.name}, at most {service.deadline_s:g} s"):
        seconds = act(service)
    screen.line(f"{service.name + ' ':<12}{done} after {seconds:5.1f} s", style="green")
