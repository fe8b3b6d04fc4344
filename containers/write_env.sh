#!/bin/bash
# Writes the settings that depend on this host: `write_env.sh FILE`. All other settings have defaults.
set -euo pipefail
device=cpu
# grep without -q reads to the end: nvidia-smi would fail if the pipe closed early.
if nvidia-smi --list-gpus 2>/dev/null | grep GPU >/dev/null &&
  docker info --format '{{.Runtimes}}' 2>/dev/null | grep nvidia >/dev/null; then
  device=gpu
fi
threads=$(($(getconf _NPROCESSORS_ONLN) / 2))
{
  echo "# Written once by make. containers/env.example lists all other settings."
  echo "STACK_DEVICE=$device"
  echo "CPU_THREADS=$((threads > 0 ? threads : 1))"
  if [ $device = gpu ]; then
    echo "DTYPE=bfloat16"
    echo "VLLM_FLAGS=--gpu-memory-utilization 0.45"
  fi
} >"$1"
echo "wrote $1: STACK_DEVICE=$device"
