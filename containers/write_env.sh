#!/bin/bash
# Writes the settings that depend on this host: `write_env.sh FILE`. All other settings have defaults.
set -euo pipefail
device=cpu driver=nvidia
# grep without -q reads to the end: nvidia-smi would fail if the pipe closed early.
offers() { docker info --format "{{.$1}}" 2>/dev/null | grep "$2" >/dev/null; }
if nvidia-smi --list-gpus 2>/dev/null | grep GPU >/dev/null; then
  if offers Runtimes nvidia; then
    device=gpu
  elif offers DiscoveredDevices nvidia.com/gpu; then
    device=gpu driver=cdi
  fi
fi
threads=$(($(getconf _NPROCESSORS_ONLN) / 2))
{
  echo "# Written once by make. containers/env.example lists all other settings."
  echo "STACK_DEVICE=$device"
  echo "CPU_THREADS=$((threads > 0 ? threads : 1))"
  if [ $device = gpu ]; then
    echo "GPU_DRIVER=$driver"
    echo "DTYPE=bfloat16"
    echo "VLLM_FLAGS=--gpu-memory-utilization 0.45"
  fi
} >"$1"
echo "wrote $1: STACK_DEVICE=$device"
