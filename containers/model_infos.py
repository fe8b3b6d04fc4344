"""Writes down, while an image is built, what vLLM asks of its model classes at every start.

`model_infos.py`, into share/vllm-modelinfos of the Python environment. vLLM keeps the answers in
its cache directory, which a container begins without; there, each first engine would start a Python
process that imports vLLM once more, 9 s on a core. `grpo_vllm.engine.vllm_compat` puts them back.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

ARCHITECTURES = (
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
"""The others cost what they cost without this."""


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["VLLM_CACHE_ROOT"] = cache

        from vllm.model_executor.models import registry

        # vLLM asks in a process of its own because of CUDA, which an image's build does not have.
        registry._run_in_subprocess = lambda ask: ask()
        for architecture in ARCHITECTURES:
            registry.ModelRegistry.models[architecture].inspect_model_cls()
        kept = Path(sys.prefix, "share", "vllm-modelinfos")
        # vLLM's files are for their owner alone, and an image is built by another than runs it.
        shutil.copytree(Path(cache, "modelinfos"), kept, copy_function=shutil.copyfile)


if __name__ == "__main__":
    main()
