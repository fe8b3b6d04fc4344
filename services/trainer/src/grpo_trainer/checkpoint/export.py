"""Exports the trained model or adapter in Hugging Face format, with its tokenizer.

A model loads with `AutoModelForCausalLM.from_pretrained`, an adapter with
`PeftModel.from_pretrained`.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import structlog

from grpo_trainer.checkpoint.atomic_dir import remove_directory, whole_directory
from grpo_trainer.model.policy_protocol import CausalLM

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

    with contextlib.suppress(OSError):  # without the file, transformers derives one
        policy.generation_config = GenerationConfig.from_pretrained(model_name)
    # transformers would take views of one storage for tied weights, so save separate tensors. They
    # are copied to the host, because a GPU may have no room for a second copy of the model.
    tensors = {name: p.detach().to("cpu", copy=True) for name, p in policy.named_parameters()}
    policy.save_pretrained(directory, state_dict=tensors)


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
