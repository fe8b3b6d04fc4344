"""Exports the trained model or adapter in Hugging Face format, with its tokenizer.

A model loads with `AutoModelForCausalLM.from_pretrained`, an adapter with
`PeftModel.from_pretrained`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import structlog
from torch import Tensor

from grpo_trainer.atomic_files import remove_directory, whole_directory
from grpo_trainer.model.policy import CausalLM

log = structlog.get_logger()

FINAL_MODEL = "final_model"
FINAL_ADAPTER = "final_adapter"


def save_policy(policy: CausalLM, model_name: str, target: Path, is_adapter: bool = False) -> None:
    """Write the model or adapter, and the tokenizer, to `target`, completely or not at all.

    Raises:
        CheckpointNotSaved: a file could not be written, e.g. the disk is full.
    """
    from transformers import AutoTokenizer

    with whole_directory(target) as directory:
        if is_adapter:
            write_adapter(policy, directory)
        else:
            write_model(policy, model_name, directory)
        AutoTokenizer.from_pretrained(model_name).save_pretrained(directory)
    log.info("model.exported", directory=str(target))


def write_model(policy: CausalLM, model_name: str, directory: Path) -> None:
    """Write weights, configuration and generation configuration in transformers' format."""
    from transformers import GenerationConfig

    # transformers would take views of one storage for tied weights, so save separate tensors. They
    # are copied to the host, because a GPU may have no room for a second copy of the model.
    tensors = {n: t.detach().to("cpu", copy=True) for n, t in model_tensors(policy).items()}
    own = policy.generation_config
    # transformers refuses to save some files that it has read, for example with a temperature and
    # without do_sample, so the model's file is copied as it is.
    policy.generation_config = GenerationConfig.from_model_config(policy.config)
    try:
        policy.save_pretrained(directory, state_dict=tensors)
    finally:
        policy.generation_config = own
    if (file := _generation_config_file(model_name)) is not None:
        shutil.copyfile(file, directory / file.name)


def model_tensors(policy: CausalLM) -> dict[str, Tensor]:
    """The tensors of a saved model by name: parameters, each once, and persistent buffers, for
    example the correction of a router."""
    saved = policy.state_dict()
    buffers = {name: buffer for name, buffer in policy.named_buffers() if name in saved}
    return dict(policy.named_parameters()) | buffers


def as_in_files(policy: CausalLM, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as transformers writes them: a mixture of experts has one for each expert in its
    files, and one for all experts in memory."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(
        policy, {name: tensor.detach() for name, tensor in tensors.items()}
    )
    return found


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
    """Write the adapter's weights in float32, and its configuration, in PEFT's format."""
    # The default "auto" would ask the model hub whether the vocabulary has grown. It never grows
    # here.
    policy.save_pretrained(str(directory), save_embedding_layers=False)


def remove_checkpoint(directory: Path) -> None:
    """Remove an exported model. A failure is logged and training continues."""
    try:
        remove_directory(directory)
    except OSError as error:
        log.warning("export.removal_failed", directory=str(directory), reason=str(error))
    else:
        log.info("export.removed", directory=str(directory))
