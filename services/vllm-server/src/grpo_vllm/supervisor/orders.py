"""Is a command to be followed? Decided before anything changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_core.weights.files import UnusableWeights, check_weights, require_rank
from grpo_core.weights.handoff import Action, Command
from grpo_vllm.forkserver.protocol import PlannedWeights
from grpo_vllm.settings import ServerSettings


@dataclass(frozen=True)
class Sorted:
    """Commands that came together: the one to look at, and those that it takes the place of."""

    newest: Command
    replaced: list[Command]


def newest_first(commands: Sequence[Command]) -> Sorted:
    """The highest version counts; of one version, the command that came last."""
    newest = max(enumerate(commands), key=lambda pair: (pair[1].version, pair[0]))[1]
    return Sorted(newest, [command for command in commands if command is not newest])


async def planned(
    command: Command, settings: ServerSettings, served: PlannedWeights
) -> PlannedWeights:
    """What the command asks to serve, everything checked that can be without loading it.

    Raises:
        UnusableWeights: it cannot be served here; nothing was changed.
    """
    _require_mode(command.action, settings)
    if command.version <= served.version and not _is_the_same(command, served):
        raise UnusableWeights(
            f"policy version {tuple(command.version)} is not newer than {tuple(served.version)}, "
            "which is served; a version names one set of weights only"
        )
    assert settings.weights_dir is not None, "_require_mode sees to it"
    # Large checkpoints take seconds to read: not on the event loop.
    directory = await asyncio.to_thread(
        check_weights, command.action.kind, command.path, command.sha256, settings.weights_dir
    )
    if command.action is not Action.RESTART_WITH_CHECKPOINT:
        require_rank(directory, settings.max_lora_rank)
    return PlannedWeights(
        version=command.version,
        kind=command.action.kind,
        directory=directory,
        sha256=command.sha256,
        trained=True,
    )


def _require_mode(action: Action, settings: ServerSettings) -> None:
    if settings.share_weights:
        raise UnusableWeights(f"{action.value}: a trainer writes this server's weights in place")
    if settings.weights_dir is None:
        raise UnusableWeights(
            f"{action.value}: this server takes no weights from disk: start it with --weights-dir"
        )
    wants_lora = action is not Action.RESTART_WITH_CHECKPOINT
    if wants_lora != settings.enable_lora:
        flag = "with --enable-lora" if wants_lora else "without --enable-lora"
        raise UnusableWeights(f"{action.value}: start the server {flag} for that")


def _is_the_same(command: Command, served: PlannedWeights) -> bool:
    """Repeated by a sender, or by a supervisor that was killed before it had answered."""
    return command.version == served.version and command.sha256 == served.sha256
