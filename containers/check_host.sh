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

device=${STACK_DEVICE:-}
if [ -z "$device" ] && [ -e .env ]; then
  device=$(sed -n 's/^STACK_DEVICE=//p' .env | tail -n 1)
fi
if [ -z "${BUILD_ONLY:-}" ] && [ "$device" = gpu ] && ! docker info --format '{{.Runtimes}}' | grep nvidia >/dev/null; then
  problem "STACK_DEVICE=gpu, but Docker has no runtime named nvidia: install NVIDIA's container toolkit, or set STACK_DEVICE=cpu in .env"
fi
