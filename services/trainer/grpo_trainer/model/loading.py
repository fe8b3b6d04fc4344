"""Loads the policy onto its device, and writes and exports its weights.

An exported model loads with `AutoModelForCausalLM.from_pretrained`, an adapter with
`PeftModel.from_pretrained`.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from grpo_core import cpu
from grpo_core.gpu import NoSuchDevice, gpu_error
from grpo_core.tree.trainer import AUTO_DEVICE, TrainerSettings
from grpo_core.tree.weights import LoraOptions
from grpo_core.weights.directory_checks import ADAPTER_CONFIG
from grpo_core.weights.model_files import load_tokenizer, require_whole_model, save_pretrained
from grpo_core.weights.ref import WeightKind
from grpo_trainer.atomic_files import whole_directory
from grpo_trainer.errors import (
    PolicyMismatch,
    UnsupportedModel,
    UnusableOptimizer,
)
from grpo_trainer.model.adapter import trained_parameters, with_adapter
from grpo_trainer.model.division import whole_tensors
from grpo_trainer.model.policy import CausalLM
from grpo_trainer.model.weights_file import WEIGHTS, weights_file
from grpo_trainer.ranks import Ranks

log = structlog.get_logger()

HOST, NOWHERE = torch.device("cpu"), torch.device("meta")
"""On `NOWHERE`, tensors have a shape and no content."""


def import_architecture(model_name: str) -> None:
    """Import the classes of a model, which takes seconds, before the server has started. Then
    compare its files with its configuration.

    Raises:
        UnsupportedModel: an adapter, a model with code of its own, or no model of text.
        UnusableWeights: see `require_whole_model`.
    """
    import transformers

    if (Path(model_name) / ADAPTER_CONFIG).is_file():
        raise UnsupportedModel(
            f"--model {model_name} is an adapter; merge it into its base model (peft's "
            "merge_and_unload) and train the result, or pass the base model"
        )
    try:
        # Without this argument, transformers would ask at the terminal.
        config = transformers.AutoConfig.from_pretrained(model_name, trust_remote_code=False)
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(
            f"--model {model_name}: transformers {transformers.__version__} has no classes for "
            "this model, and code of its own (auto_map) is not run; choose a model that "
            f"transformers supports ({str(error).splitlines()[0]})"
        ) from error
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise UnsupportedModel(
            f"--model {model_name}: a {config.model_type} is no causal language model"
        )
    for name in (*(config.architectures or ()), "AutoModelForCausalLM"):
        getattr(transformers, name, None)  # an attribute is imported when it is read
    require_whole_model(model_name, transformers.AutoModelForCausalLM)


def device_to_load_on(wanted: str) -> torch.device:
    """The device to train on. "auto" takes a GPU if there is one. It becomes CUDA's current device.

    Raises:
        NoSuchDevice: this process cannot see that GPU, or its torch has no CUDA.
    """
    if wanted == AUTO_DEVICE:
        return _current(torch.device("cuda", 0) if torch.cuda.is_available() else HOST)
    device = torch.device(wanted)
    if device.type != "cuda":
        return device
    index, count = device.index or 0, torch.cuda.device_count()
    if not torch.cuda.is_available():
        raise NoSuchDevice(
            f"--device {wanted}: torch {torch.__version__} finds no GPU. {_why_no_gpu()}"
        )
    if index >= count:
        raise NoSuchDevice(
            f"--device {wanted}: this process sees {count} GPUs, numbered from 0; choose one of "
            "these GPUs"
        )
    return _current(torch.device("cuda", index))


def _why_no_gpu() -> str:
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as error:
        return str(gpu_error(error) or error)
    return "Check nvidia-smi and CUDA_VISIBLE_DEVICES"


def require_device(wanted: str, shared: torch.device) -> None:
    """Check that --device fits the device of the shared weights, which becomes CUDA's current
    device.

    Raises:
        PolicyMismatch: --device names another one.
    """
    device = shared if wanted == AUTO_DEVICE else torch.device(wanted)
    if device.type != shared.type or device.index not in (None, shared.index):
        raise PolicyMismatch(
            f"--device {wanted}, but the served weights are on {shared}; omit --device, or "
            "start the server on that device"
        )
    _current(shared)


def _current(device: torch.device) -> torch.device:
    """Make the device CUDA's current one. Triton and libraries would otherwise use the
    first GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


@dataclass(frozen=True)
class TrainedWeights:
    """Loads and writes the trained weights. `lora` is None if every parameter is trained; else the
    model is frozen and an adapter is trained. `is_divided`: the whole model stays in host memory
    until it is divided."""

    model_name: str
    lora: LoraOptions | None = None
    is_divided: bool = False

    @classmethod
    def of(cls, settings: TrainerSettings) -> TrainedWeights:
        return cls(settings.model, settings.lora, settings.fsdp)

    @property
    def kind(self) -> WeightKind:
        """The kind of the directories that `write` creates."""
        return WeightKind.CHECKPOINT if self.lora is None else WeightKind.ADAPTER

    def load(self, dtype: torch.dtype, device: torch.device = HOST) -> CausalLM:
        """Load the untrained policy onto `device`, in `dtype`.

        Raises:
            PolicyMismatch: the options do not fit the model.
            UnsupportedModel: see `import_architecture`.
        """
        from transformers import AutoModelForCausalLM

        import_architecture(self.model_name)
        name, type_name = self.model_name, str(dtype).removeprefix("torch.")
        if self.is_divided and device != NOWHERE:
            device = HOST
        policy: CausalLM = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, device_map=NOWHERE if device == NOWHERE else None
        ).to(device)
        log.info("model.loaded", model=name, dtype=type_name, device=str(device))
        if self.lora is None:
            return policy
        adapted = with_adapter(policy, self.lora)
        log.info("adapter.added", r=self.lora.r, products=type_name)
        return adapted

    def write(self, policy: CausalLM, target: Path, with_tokenizer: bool = False) -> None:
        """Write the model or adapter, completely or not at all. A server that has the model's
        tokenizer needs no more.

        Raises:
            CheckpointNotSaved: a file could not be written, e.g. the disk is full.
        """
        import transformers

        with whole_directory(target) as directory:
            self.write_into(policy, directory)
            if with_tokenizer:
                load_tokenizer(self.model_name, transformers).save_pretrained(directory)

    def write_into(self, policy: CausalLM, directory: Path, with_weights: bool = True) -> None:
        """Write the files of the model, perhaps without its weights, or of the adapter. Raises
        `OSError`, `SafetensorError`."""
        if self.lora is None:
            write_model(policy, self.model_name, directory, with_weights)
        else:
            write_adapter(policy, directory)


def broadcast_policy(
    policy: CausalLM | None, settings: TrainerSettings, ranks: Ranks
) -> tuple[CausalLM, TrainerSettings]:
    """Rank 0's policy, and settings with its optimizer, on every rank. The others load the model,
    and take all weights of rank 0, also those that are not trained; with --fsdp when the policy is
    divided.

    Args:
        policy: None on ranks above 0

    Raises:
        UnusableOptimizer: several ranks, and weights in float16.
    """
    chosen = None
    if policy is not None:
        if ranks.count > 1 and any(p.dtype == torch.float16 for p in policy.parameters()):
            raise UnusableOptimizer(
                "several trainer processes need weights in bfloat16 or float32, not float16; serve "
                "the model in bfloat16, or start one trainer process"
            )
        weights = next(policy.parameters())
        name = str(weights.dtype).removeprefix("torch.")
        device = device_to_load_on(settings.device) if settings.fsdp else weights.device
        chosen = [name, settings.optimizer_on(device.type)]
    dtype, optimizer = ranks.broadcast(chosen, "the model") or ["", ""]
    if policy is None:
        device = NOWHERE if settings.fsdp else device_to_load_on(settings.device)
        policy = TrainedWeights.of(settings).load(getattr(torch, dtype), device).eval()
        settings = settings.model_copy(update={"optimizer": optimizer})
    for parameter in () if settings.fsdp else policy.parameters():
        ranks.from_leader(parameter.data, "the weights")
    return policy, settings


def warn_of_slow_type(policy: CausalLM) -> None:
    """Log if the policy is in bfloat16 on a CPU without instructions for it."""
    weights = next(policy.parameters())
    is_slow = cpu.CPU.is_slow_in_bfloat16 and weights.device.type == "cpu"
    if is_slow and weights.dtype == torch.bfloat16:
        log.warning(
            "dtype.slow",
            reason=cpu.SLOW,
            hint="start the server and the trainer without --dtype, or with --dtype float32",
        )


def write_model(
    policy: CausalLM, model_name: str, directory: Path, with_weights: bool = True
) -> None:
    """Write weights, configuration and generation configuration in transformers' format."""
    from transformers import GenerationConfig

    own = policy.generation_config
    # transformers refuses to save some files that it has read, for example with a temperature and
    # without do_sample, so the model's file is copied as it is.
    policy.generation_config = GenerationConfig.from_model_config(policy.config)
    try:
        save_pretrained(policy, directory, state_dict={})
    finally:
        policy.generation_config = own
    if with_weights:
        with (directory / WEIGHTS).open("wb") as weights:
            for piece in weights_file(policy)[1]:
                weights.write(piece.cpu().numpy().data)
    if (file := _generation_config_file(model_name)) is not None:
        shutil.copyfile(file, directory / file.name)


def _generation_config_file(model_name: str) -> Path | None:
    from transformers.utils import GENERATION_CONFIG_NAME, cached_file

    found = cached_file(
        model_name,
        GENERATION_CONFIG_NAME,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)


def write_adapter(policy: CausalLM, directory: Path) -> None:
    """Write the adapter's weights, in their data type, and its configuration, in PEFT's format."""
    # The default "auto" would ask the model hub whether the vocabulary has grown. It never grows
    # here.
    tensors = dict(whole_tensors(policy, trained_parameters(policy)))
    save_pretrained(policy, directory, state_dict=tensors, save_embedding_layers=False)
    # peft writes this set in another order in each process, but equal adapters need equal digests.
    file = directory / ADAPTER_CONFIG
    config = json.loads(file.read_text())
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()
    file.write_text(json.dumps(config, indent=2, sort_keys=True))
