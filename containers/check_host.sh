#!/bin/bash
# Checks that this host can run the stack: `check_host.sh MODE MODES...`. Prints the first problem and ends
# with status 1. With BUILD_ONLY, the host needs no GPU: images for GPUs are built without one.
set -euo pipefail
mode=$1
shift

problem() {
  echo "$1" >&2
  exit 1
}

case " $* " in
  *" $mode "*) ;;
  *) problem "MODE=$mode: no such mode; choose one of: $*" ;;
esac
command -v docker >/dev/null ||
  problem "docker is not installed: install Docker Engine 20.10 or newer (Debian, Ubuntu: apt-get install docker.io)"
docker compose version >/dev/null 2>&1 ||
  problem "docker has no compose plugin: install Docker Compose 2.24 or newer (Debian, Ubuntu: docker-compose-plugin or docker-compose-v2)"
docker buildx version >/dev/null 2>&1 ||
  problem "docker has no buildx plugin, which builds the images: install docker-buildx-plugin or docker-buildx"
docker info >/dev/null 2>&1 ||
  problem "the Docker engine does not answer: start the Docker engine (systemctl start docker), or set DOCKER_HOST; $(docker info 2>&1 | tail -1)"

setting() { # of the environment, or of .env
  local value=${!1:-}
  if [ -z "$value" ] && [ -e .env ]; then
    value=$(sed -n "s/^$1=//p" .env | tail -n 1)
  fi
  echo "$value"
}

if [ -n "$(setting RUN_API_TOKEN)" ] && [ -z "$(setting RUN_API_TOKEN_FILE)" ]; then
  problem "RUN_API_TOKEN is set, but containers read the access token from a file, because docker inspect shows variables: write the token into a file that uid 1000 may read, and set RUN_API_TOKEN_FILE to the path of this file instead"
fi

replicas=$(setting REPLICAS)
if [ "${replicas:-1}" != 1 ]; then
  [[ $replicas =~ ^[1-9][0-9]*$ ]] || problem "REPLICAS=$replicas: expected a number of inference servers, at least 1"
  [ "$mode" != shared_vllm ] ||
    problem "REPLICAS=$replicas: in mode shared_vllm the trainer shares the memory of one server; set MODE=none, lora_only or lora_restart, or REPLICAS=1"
  ports=$(setting VLLM_PORT)
  case $ports in
    "" | *-*) ;;
    *) problem "VLLM_PORT=$ports: $replicas servers need a range of ports; set VLLM_PORT=$ports-$((ports + replicas - 1))" ;;
  esac
fi
ranks=$(setting RANKS)
if [ "${ranks:-1}" != 1 ] && [ "$mode" = shared_vllm ]; then
  problem "RANKS=$ranks: mode shared_vllm needs one trainer process, because it trains the server's own memory; set MODE=none, lora_only or lora_restart, or RANKS=1"
fi
flags=$(setting VLLM_FLAGS)
if [ "$mode" = shared_vllm ] && [[ $flags =~ --tensor-parallel-size[=\ ]+([2-9]|1[0-9]) ]]; then
  problem "VLLM_FLAGS=$flags: in mode shared_vllm the trainer writes whole weights into the memory of one worker; set MODE=none, lora_only or lora_restart, or remove --tensor-parallel-size"
fi
device=$(setting STACK_DEVICE)
if [ "${replicas:-1}" != 1 ] && [ "$device" = gpu ]; then
  problem "REPLICAS=$replicas with STACK_DEVICE=gpu: Compose would give every server the same GPU; set REPLICAS=1, or use the chart (docs/how-to/kubernetes.md)"
fi
if [ -z "${BUILD_ONLY:-}" ] && [ "$device" = gpu ]; then
  driver=$(setting GPU_DRIVER)
  case ${driver:-nvidia} in
    nvidia) field=Runtimes offer=nvidia lacks="Docker has no runtime named nvidia: install NVIDIA's container toolkit, set GPU_DRIVER=cdi if docker info lists nvidia.com/gpu, or set STACK_DEVICE=cpu" ;;
    cdi) field=DiscoveredDevices offer=nvidia.com/gpu lacks="docker info lists no nvidia.com/gpu: with Docker 28.2 or newer, run nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml, or set STACK_DEVICE=cpu" ;;
    *) problem "GPU_DRIVER=$driver: choose nvidia or cdi" ;;
  esac
  docker info --format "{{.$field}}" 2>/dev/null | grep "$offer" >/dev/null ||
    problem "STACK_DEVICE=gpu with GPU_DRIVER=${driver:-nvidia}, but $lacks in .env"
fi
