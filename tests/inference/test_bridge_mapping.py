"""`vllm_name` and `slice` of each mapping agree with vLLM's own model and the checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.inference import START_DEADLINE_S

pytestmark = pytest.mark.full

# In a process of its own: vLLM's loader leaves a process group and patched devices behind.
LOAD_AND_COMPARE = """
import sys, tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs

from grpo_vllm.loader import SharedModelLoader, shared_parameters

model_path = Path(sys.argv[1])
torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker does
config = EngineArgs(
    model=str(model_path), load_format="grpo_shared", dtype="float32", enforce_eager=True
).create_engine_config()
with set_current_vllm_config(config):
    init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/store", 0, "gloo")
    ensure_model_parallel_initialized(1, 1)
    model = SharedModelLoader(config.load_config).load_model(config, config.model_config)

checkpoint = load_file(model_path / "model.safetensors")
parameters = dict(model.named_parameters())
mappings = shared_parameters(model).manifest.parameters
assert set(mappings) == set(checkpoint), set(mappings) ^ set(checkpoint)
for name, mapping in mappings.items():
    parameter = parameters[mapping.vllm_name]
    if mapping.slice is not None:
        start, stop = mapping.slice
        parameter = parameter[start:stop]
    assert torch.equal(parameter, checkpoint[name].float()), name
assert {mapping.vllm_name for mapping in mappings.values()} == set(parameters)
print("compared", len(mappings), "of", len(parameters))
"""


def test_cutting_the_served_parameter_gives_the_checkpoints_tensor(tiny_model: Path) -> None:
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD_AND_COMPARE, str(tiny_model)],
        env={**os.environ, "VLLM_ENABLE_SHARED_WEIGHTS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=START_DEADLINE_S,
        check=False,
    )
    assert loaded.returncode == 0, loaded.stderr[-3000:]
    assert loaded.stdout.splitlines()[-1] == "compared 50 of 30"
