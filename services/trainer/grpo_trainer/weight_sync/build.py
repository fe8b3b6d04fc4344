"""Creates the weight-sync object of the chosen mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from grpo_core.clients.inference import BridgeClient
from grpo_core.security import plain
from grpo_core.weights.supervisor import Action, SupervisorClient
from grpo_trainer.checkpoint.store import OpenedEpochs
from grpo_trainer.config.sync import (
    CheckpointRestartSettings,
    HandOffSettings,
    LoraOnlySettings,
    LoraRestartSettings,
    SharedVllmSettings,
    served_weights_directory,
)
from grpo_trainer.config.trainer import TrainerSettings
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.weight_sync.attachment import WeightPlaces
from grpo_trainer.weight_sync.base import WeightSync
from grpo_trainer.weight_sync.files import FileSync
from grpo_trainer.weight_sync.publisher import Publisher, WeightDirectories
from grpo_trainer.weight_sync.server import ServerMonitor, inference_server
from grpo_trainer.weight_sync.shared import SharedVllm

ACTIONS = {
    LoraOnlySettings: Action.LOAD_ADAPTER,
    LoraRestartSettings: Action.RESTART_WITH_ADAPTER,
    CheckpointRestartSettings: Action.RESTART_WITH_CHECKPOINT,
}


@contextlib.contextmanager
def open_weight_sync(
    settings: TrainerSettings, starts_from_model: bool = False
) -> Iterator[WeightSync]:
    """That of the mode, with its inference server, which is started if the mode may do so. Args:
    starts_from_model: see `SharedVllm`"""
    with (
        inference_server(settings),
        contextlib.closing(build_weight_sync(settings, starts_from_model)) as sync,
    ):
        yield sync


def build_weight_sync(settings: TrainerSettings, starts_from_model: bool = False) -> WeightSync:
    """Create the object without sending a request. Args: starts_from_model: see `SharedVllm`"""
    chosen = settings.sync
    if isinstance(chosen, SharedVllmSettings):
        return _shared(settings, chosen, starts_from_model)
    return _by_files(settings, chosen)


def _bridge(settings: TrainerSettings, control_url: str | None = None) -> BridgeClient:
    key = plain(settings.vllm_api_key)
    return BridgeClient(settings.inference_url, settings.service_deadline_s, control_url, key)


def _shared(
    settings: TrainerSettings, chosen: SharedVllmSettings, starts_from_model: bool
) -> SharedVllm:
    return SharedVllm(
        bridge=_bridge(settings, chosen.vllm_control_url),
        model_name=settings.model,
        places=WeightPlaces(chosen.weights_socket, chosen.vllm_config_path),
        dtype=settings.dtype,
        device=settings.device,
        lease_s=chosen.pause_lease_s,
        return_deadline_s=settings.server_return_deadline_s,
        epochs=OpenedEpochs(settings.save_path),
        verify_every_steps=chosen.verify_every_steps,
        starts_from_model=starts_from_model,
    )


def _by_files(settings: TrainerSettings, chosen: HandOffSettings) -> FileSync:
    url, action = settings.redis_url.get_secret_value(), ACTIONS[type(chosen)]
    supervisor = SupervisorClient(url, settings.run_id or "", settings.service_deadline_s)
    monitor = ServerMonitor(supervisor, settings.server_return_deadline_s)
    return FileSync(
        bridge=_bridge(settings),
        supervisor=supervisor,
        monitor=monitor,
        publisher=Publisher(supervisor, monitor, action, chosen.publish_deadline_s),
        weights=TrainedWeights(settings.model, settings.lora),
        directories=WeightDirectories(served_weights_directory(settings.save_path)),
        dtype=settings.dtype,
        device=settings.device,
        every_steps=chosen.publish_every_steps,
        last_step=settings.steps,
    )
