#!/usr/bin/env bash
# Packs vLLM and the requirements of our packages for a GPU host without network. See docs/how-to/gpu-host.md.
#
#   scripts/gpu/bundle.sh DIR [PART_MB [CAPABILITY]]
#
# Writes DIR/part-00, part-01, ... of PART_MB (default: 50) MB each, their checksums, install.sh and the files
# that install.sh reads. Runs on any Linux machine with access to a package index; the wheels are chosen for the
# GPU host. With CAPABILITY, for example 90 for an H100 or an H200, code for other GPUs is left out. PYTHON names
# an interpreter with pip and packaging (default: python3).
set -euo pipefail

dir=${1:?usage: bundle.sh DIR [PART_MB [CAPABILITY]]}
part_mb=${2:-50}
capability=${3:-}
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}

"$python" -c 'import packaging, pip' || {
  echo "bundle.sh: $python lacks the package pip or packaging; set PYTHON to an interpreter that has both packages" >&2
  exit 1
}

# pip matches platform tags exactly. Wheels for an older C library also load with a newer one.
platforms=(--platform manylinux1_x86_64 --platform manylinux2014_x86_64)
for glibc in 17 24 26 27 28 31 34; do
  platforms+=(--platform "manylinux_2_${glibc}_x86_64")
done

mkdir -p "$dir"
# install.sh refuses a bundle without checksums, so an incomplete bundle cannot be installed.
rm -f "$dir/parts.sha256" "$dir"/part-*
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT

"$python" -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 \
  --implementation cp --abi cp312 --abi abi3 --abi none "${platforms[@]}" \
  --dest "$wheels" --requirement "$here/vllm-0.24-cp312.txt"
"$python" "$here/check_wheels.py" pack "$wheels"

echo "packing: a few minutes"
"$python" "$here/pack_wheels.py" "$wheels" ${capability:+"$capability"} |
  split --bytes "${part_mb}MB" --numeric-suffixes - "$dir/part-"
cp "$here"/{install.sh,check_wheels.py,host-has.txt,left-out.txt} "$dir"
(cd "$dir" && sha256sum part-* >parts.sha256.new && mv parts.sha256.new parts.sha256)
printf '%s parts in %s, %s MB\n' "$(wc -l <"$dir/parts.sha256")" "$dir" \
  "$(cat "$dir"/part-* | wc -c | awk '{printf "%.0f", $1 / 1e6}')"
