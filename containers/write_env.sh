#!/bin/bash
# Writes the settings that depend on this host: `write_env.sh FILE`. Everything else has a default.
set -euo pipefail
device=cpu
# grep without -q reads all of it: what is written into a pipe that has closed ends in a failure.
if nvidia-smi --list-gpus 2>/dev/null | grep GPU >/dev/null &&
  docker info --format '{{.Runtimes}}' 2>/dev/null | grep nvidia >/dev/null; then
  device=gpu
fi
threads=$(($(getconf _NPROCESSORS_ONLN) / 2))
{
  echo "# Written by make, once. See .env.example for everything else that can stand here."
  echo "STACK_DEVICE=$device"
  echo "CPU_THREADS=$((threads > 0 ? threads : 1))"
  if [ $device = gpu ]; then
    echo "DTYPE=bfloat16"
    echo "VLLM_FLAGS=--gpu-memory-utilization 0.45"
  fi
} >"$1"
echo "wrote $1: STACK_DEVICE=$device"
