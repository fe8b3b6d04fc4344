"""Bases of commands that start services, and pass on their options, such as `--trainer.lr 1e-4`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field

from grpo_core.settings import CommandSettings, LogLevel, Mistake, Shown
from grpo_core.settings.options import Names, options_of
from grpo_runs.service_options import (
    SERVER,
    SET_BY_RUNNER,
    TRAINER,
    Options,
    UnexpectedWord,
    mistakes_in,
    options_by_service,
    options_set_elsewhere,
    section,
    trainer_has,
    words_of_sections,
)

T = TypeVar("T")

HUB_OR_SMOLLM2 = (
    "an id on the Hugging Face hub, or smollm2 (SmolLM2-135M-Instruct, made from two optional "
    "packages)"
)
"""Values of --model that are no directory, for the user."""


def each_once(values: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(values))


SIZES_OF_SERVER = frozenset({"gpu-memory-utilization", "max-model-len"})
"""The trainer has these too, for a server that it starts itself."""
GPU_CONTROL = Path("/dev/nvidiactl")
"""Exists if the NVIDIA driver is loaded."""


class WithServiceOptions(CommandSettings):
    """`services`: those that the command starts. `default_service`: the one whose options need no
    prefix."""

    services: ClassVar[tuple[str, ...]]
    default_service: ClassVar[str | None] = None
    sets_too: ClassVar[Mapping[str, frozenset[str]]] = {}
    """Further options of services that the command sets."""

    service_options: tuple[str, ...] = Field(
        (),
        description="Options for one service, such as --trainer.max-staleness 4 for the trainer",
    )

    @classmethod
    def prepare_file(cls, content: dict[str, Any]) -> dict[str, Any]:
        words, rest = words_of_sections(content)
        return rest | ({"service-options": words} if words else {})

    def options_of(self, service: str) -> Options:
        return self._by_service().get(service, {})

    def _by_service(self) -> dict[str, Options]:
        return options_by_service(self.service_options, self.default_service)

    def resolved(self) -> dict[str, Any]:
        values = super().resolved()
        del values["service_options"]
        given = self._by_service()
        return values | {service: section(options) for service, options in given.items()}

    def start_mistakes(self) -> Iterator[Mistake]:
        found = [*self._machine_mistakes()]
        yield from found
        if not found and not any(self.mistakes()):
            yield from self._mistakes_of_services()

    @abstractmethod
    def _machine_mistakes(self) -> Iterator[Mistake]:
        """Mistakes that depend on this machine, in the options of the command itself."""

    def mistakes(self) -> Iterator[Mistake]:
        try:
            given = self._by_service()
        except UnexpectedWord as word:
            yield Mistake(None, self._unexpected(str(word)))
            return
        prog, own = self.command.prog, [*options_of(type(self)), *self.command.aliases]
        names = [name.replace("_", "-") for name in own]
        for service, options in given.items():
            if service not in self.services:
                message = f"--{service}.{next(iter(options))}: {prog} starts no such service"
                yield Mistake(None, f"{message}; omit this option")
            for name in self.sets_too.get(service, frozenset()).intersection(options):
                yield Mistake(None, f"--{service}.{name}: {prog} sets this option itself; omit it")
            for message in options_set_elsewhere(
                service, options, prog, names, self.default_service
            ):
                yield Mistake(None, message)

    def _mistakes_of_services(self) -> Iterator[Mistake]:
        """A service checks its options itself, which takes half a second."""
        for service, options in self._by_service().items():
            arguments, environment = self._words_for(service)
            for message in mistakes_in(service, options, arguments, environment):
                if service == self.default_service:
                    message = message.replace(f"--{service}.", "--")
                yield Mistake(None, message)

    @abstractmethod
    def _words_for(self, service: str) -> tuple[list[str], Mapping[str, str]]:
        """What the service requires for a `--dry-run`: words and variables."""

    def _unexpected(self, word: str) -> str:
        if not word.startswith("--"):
            return f"{word!r}: unexpected; every option begins with --"
        typed = word.partition("=")[0]
        name = typed.removeprefix("--").replace("_", "-")
        owner = None
        if TRAINER in self.services:
            if name in SET_BY_RUNNER[TRAINER] | self.sets_too.get(TRAINER, frozenset()):
                return f"{typed}: {self.command.prog} sets this option itself; omit it"
            owner = SERVER if name in SIZES_OF_SERVER else TRAINER if trainer_has(name) else None
        if owner:
            return f"{typed}: an option of the {owner}; write --{owner}.{name}"
        return f"{typed}: {Names(self.command, options_of(type(self))).unknown(name)}"


class ServerOptions(WithServiceOptions):
    """`gpu_memory_utilization`, `compute_threads` and `seed`: see the commands."""

    gpu_memory_utilization: float
    compute_threads: int
    seed: int
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Shown(default="float32; on a GPU bfloat16"),
    ] = Field(None, description="Data type of the weights")
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="Device to compute on: cpu, cuda or cuda:N. auto: a GPU if there is one, "
        "otherwise cpu",
    )
    eager: Annotated[bool | None, Shown(default="on; on a GPU off")] = Field(
        None,
        description="Start the server sooner, without compilation and CUDA graphs. With --no-eager,"
        " the server starts later but samples faster, which saves time in long runs",
    )
    log_level: LogLevel = Field(
        "INFO", description="Least severe level of the messages in the services' log files"
    )

    @property
    def on_gpu(self) -> bool:
        """All services use the same device."""
        return GPU_CONTROL.exists() if self.device == "auto" else self.device.startswith("cuda")

    @property
    def weights_dtype(self) -> str:
        return self.dtype or ("bfloat16" if self.on_gpu else "float32")

    @property
    def starts_eager(self) -> bool:
        return self.eager if self.eager is not None else not self.on_gpu
