"""Saves what was trained where and how its users expect it.

A whole model loads with `AutoModelForCausalLM.from_pretrained`, an adapter with
`PeftModel.from_pretrained`; its tokenizer lies beside each.
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
    """Write model or adapter, and tokenizer, to `target`, complete and durable or not at all.

    Raises:
        CheckpointNotSaved: the disk is full, or the like.
    """
    from transformers import AutoTokenizer

    with whole_directory(target) as directory:
        if is_adapter:
            write_adapter(policy, directory)
        else:
            _write_model(policy, model_name, directory)
        AutoTokenizer.from_pretrained(model_name).save_pretrained(directory)
    log.info("saved", directory=str(target))


def _write_model(policy: CausalLM, model_name: str, directory: Path) -> None:
    """Weights, configuration and generation configuration, as transformers has them."""
    from transformers import GenerationConfig

    with contextlib.suppress(OSError):  # most models have one; without, the configuration's
        policy.generation_config = GenerationConfig.from_pretrained(model_name)
    # Views share one storage, which would be taken for tied weights: save separate tensors.
    # On the host: a second copy of the model may be more than a GPU has left.
    tensors = {name: p.detach().to("cpu", copy=True) for name, p in policy.named_parameters()}
    policy.save_pretrained(directory, state_dict=tensors)


def write_adapter(policy: CausalLM, directory: Path) -> None:
    """Adapter weights in float32 and their configuration, as PEFT has them."""
    # "auto" asks the model hub whether the vocabulary has grown; ours never does.
    policy.save_pretrained(str(directory), save_embedding_layers=False)


def remove_checkpoint(directory: Path) -> None:
    """One that may be gone already, or that something may keep from going."""
    try:
        remove_directory(directory)
    except OSError as error:
        log.warning("checkpoint.kept", directory=str(directory), reason=str(error))
    else:
        log.info("checkpoint.removed", directory=str(directory))
