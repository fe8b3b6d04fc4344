"""The object that stands for the mode."""

from __future__ import annotations

from grpo_core.clients.inference import BridgeClient
from grpo_core.clients.supervisor import SupervisorClient
from grpo_core.security.bearer_token import plain
from grpo_core.weights.supervisor_protocol import Action
from grpo_trainer.config.modes import Mode
from grpo_trainer.config.sync import served_weights_directory
from grpo_trainer.config.trainer import TrainerSettings
from grpo_trainer.model.loading import Adapter, TrainedWeights, WholeModel
from grpo_trainer.weight_sync.base import WeightSync
from grpo_trainer.weight_sync.files.file_sync import Cadence, FileSync
from grpo_trainer.weight_sync.files.publisher import Publisher
from grpo_trainer.weight_sync.files.server_monitor import ServerMonitor
from grpo_trainer.weight_sync.files.weight_directories import WeightDirectories
from grpo_trainer.weight_sync.shared_memory.attachment import WeightPlaces
from grpo_trainer.weight_sync.shared_memory.opened_epochs import OpenedEpochs
from grpo_trainer.weight_sync.shared_memory.shared_vllm import SharedVllm

ACTIONS = {
    Mode.LORA_ONLY: Action.LOAD_ADAPTER,
    Mode.LORA_RESTART: Action.RESTART_WITH_ADAPTER,
    Mode.NONE: Action.RESTART_WITH_CHECKPOINT,
}


def build_weight_sync(settings: TrainerSettings) -> WeightSync:
    """Nothing is asked of anybody yet."""
    bridge = BridgeClient(
        settings.inference_url,
        settings.service_deadline_s,
        settings.vllm_control_url,
        plain(settings.vllm_api_key),
    )
    if settings.mode is Mode.SHARED_VLLM:
        return _shared(settings, bridge)
    return _by_files(settings, bridge)


def _shared(settings: TrainerSettings, bridge: BridgeClient) -> SharedVllm:
    return SharedVllm(
        bridge=bridge,
        model_name=settings.model_name,
        places=WeightPlaces(settings.weights_socket, settings.vllm_config_path),
        dtype=settings.dtype,
        device=settings.device,
        lease_s=settings.pause_lease_s,
        return_deadline_s=settings.server_return_deadline_s,
        epochs=OpenedEpochs(settings.save_path),
    )


def _by_files(settings: TrainerSettings, bridge: BridgeClient) -> FileSync:
    url, action = plain(settings.redis_url), ACTIONS[settings.mode]
    assert url is not None, "the settings refuse these modes without --redis-url"
    supervisor = SupervisorClient(url, settings.run_id, settings.service_deadline_s)
    monitor = ServerMonitor(supervisor, settings.server_return_deadline_s)
    return FileSync(
        bridge=bridge,
        supervisor=supervisor,
        monitor=monitor,
        publisher=Publisher(supervisor, monitor, action, settings.publish_deadline_s),
        weights=_weights(settings),
        directories=WeightDirectories(served_weights_directory(settings.save_path)),
        dtype=settings.dtype,
        device=settings.device,
        cadence=Cadence(
            every_steps=settings.publish_every_steps,
            last_step=settings.training_steps,
            at_start=not action.restarts,
        ),
    )


def _weights(settings: TrainerSettings) -> TrainedWeights:
    if settings.lora is None:
        return WholeModel(settings.model_name)
    return Adapter(settings.model_name, settings.lora)
