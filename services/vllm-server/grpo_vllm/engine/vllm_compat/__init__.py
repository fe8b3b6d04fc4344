"""The only package that imports vLLM; it hides differences between vLLM's versions.

If a new version of vLLM breaks the server, the fix belongs here: in `launch` (options, engine,
application), `layers` (model loading, weight layout), `requests` (types), `cpu` (adapters and
attention on a CPU) or `platform_plugin`. `tests/inference/vllm_hooks.py` lists everything that we
use, and `test_vllm_internals.py` checks that it still exists. We also rely on this behaviour:

- on CUDA the two unquantised methods do not move the weights (`process_weights_after_loading` does
  nothing), and no CUDA graph holds them as constants
- `current_platform.get_device_capability()` does not initialise CUDA
- a pause waits for the device in 0.32, but not in 0.24
- a pause of the scheduler alone queues new requests; `pause_generation` rejects them in 0.33
- a worker may answer only with None, bool, int, float, str, bytes, list and dict: any other type
  ends the thread that sends all answers
- a logits processor's `validate_params` is called for every request on every route
- the error handlers of vLLM's own routes stop `app.state.server`
- every route looks a model name up in `lora_requests` before it uses the base model
- vLLM's processes inherit the environment and read its switches once

docs/how-to/gpu.md has a table of the versions, and of what each was seen to do.
"""

import os

# vLLM before 0.31 imports pandas if it is installed, which imports pyarrow. The memory allocator of
# pyarrow starts a thread, and a process with threads cannot be forked.
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
SERVER_VARIABLE = "GRPO_VLLM_SERVER"
"""Environment variable that our server sets for its processes."""
