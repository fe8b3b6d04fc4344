#!/usr/bin/env bash
# Runs parts of the GPU tests, each in less than 8 minutes: `run.sh [--any-device] PART...`. With --any-device, a host
# without a GPU runs those tests that do not need one.
# Parts: proof, modes, swaps, memory, precision. PYTHON names an interpreter with vLLM, a CUDA build of torch and our packages (docs/how-to/gpu.md).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
part_limit_s=480
any_device=
if [ "${1:-}" = --any-device ]; then
  any_device=1
  shift
fi

"$python" - "$any_device" <<'CHECK'
import sys
try:
    import grpo_trainer, grpo_vllm, torch, vllm
except ImportError as error:
    sys.exit(f"{sys.executable}: {error}; docs/how-to/gpu-host.md says what to install")
if not torch.cuda.is_available():
    if sys.argv[1]:
        print("no GPU: tests that need one are skipped")
        sys.exit()
    sys.exit(f"torch {torch.__version__} finds no CUDA device: these tests need one")
device = torch.cuda.get_device_properties(0)
print(f"{device.name}, {device.total_memory / 2**30:.0f} GiB, torch {torch.__version__}, "
      f"CUDA {torch.version.cuda}, vLLM {vllm.__version__}, Python {sys.version.split()[0]}")
CHECK

swaps=tests/inference/test_lora_server.py
tests_of() {
  case $1 in
    proof) echo tests/inference/test_shared_weights.py tests/gpu/test_proof_without_vllm.py \
      tests/inference/test_vllm_internals.py ;;
    modes) echo tests/gpu/test_modes.py ;;
    swaps) echo "$swaps::test_no_request_fails_in_swaps_under_load[20]" \
      "$swaps::test_after_every_swap_the_new_adapter_is_served_and_nothing_of_the_one_before" ;;
    memory) echo tests/gpu/test_memory.py tests/inference/test_bridge_restart.py ;;
    precision) echo tests/gpu/test_precision.py ;;
    *) echo "unknown part $1: proof, modes, swaps, memory or precision" >&2; return 2 ;;
  esac
}

failed=()
for part in "$@"; do
  tests=$(tests_of "$part")
  started=$SECONDS
  # Other versions of third-party packages may warn, which is no failure.
  # shellcheck disable=SC2086  # a list of paths
  timeout --kill-after=30 "$part_limit_s" "$python" -m pytest $tests -v -s -W default --durations=10 \
    || failed+=("$part")
  printf 'part %s: %d seconds\n' "$part" $((SECONDS - started))
done
if [ "${#failed[@]}" -gt 0 ]; then
  printf 'failed: %s\n' "${failed[*]}"
  exit 1
fi
