#!/usr/bin/env bash
# On the GPU host: installs what bundle.sh packed beside what the host has. See docs/how-to/gpu-host.md.
#
#   install.sh PARTS_DIR [SITE_DIR]      afterwards: export PYTHONPATH=SITE_DIR
#
# SITE_DIR (PARTS_DIR/site) is there when all of it is. PYTHON is the host's own interpreter (python3).
set -euo pipefail

parts=${1:?usage: install.sh PARTS_DIR [SITE_DIR]}
site=$(realpath --canonicalize-missing "${2:-$parts/site}")
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}

fail() {
  printf 'install.sh: %s\n' "$1" >&2
  exit 1
}

[ ! -e "$site" ] || fail "$site is there already; remove it, or name another directory"
"$python" -c 'import packaging, pip' || fail "$python needs pip and packaging; PYTHON names another"

index=$parts/parts.sha256
[ -f "$index" ] || fail "$index is missing: copy it from where bundle.sh wrote it"
mapfile -t names < <(awk '{print $2}' "$index")
missing=()
for name in "${names[@]}"; do
  [ -f "$parts/$name" ] || missing+=("$name")
done
[ ${#missing[@]} -eq 0 ] || fail "of ${#names[@]} parts these are missing in $parts: ${missing[*]}"
damaged=$(cd "$parts" && sha256sum --check --quiet parts.sha256 2>/dev/null | cut -d: -f1) ||
  fail "damaged, copy again: ${damaged//$'\n'/ }"

mkdir -p "$(dirname "$site")"
wheels=$(mktemp -d)
unfinished=$(mktemp -d "$site.XXXXXX")
trap 'rm -rf "$wheels" "$unfinished"' EXIT

# Not tar -J: that needs xz, and Python has it built in.
(cd "$parts" && cat "${names[@]}") | "$python" -c '
import sys, tarfile
with tarfile.open(fileobj=sys.stdin.buffer, mode="r|xz") as archive:
    archive.extractall(sys.argv[1], filter="data")' "$wheels"
"$python" "$here/check_wheels.py" host "$wheels" ||
  fail "this host is not one that the bundle is for; where an exact version does no harm here, add it to $here/left-out.txt"

"$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
  --target "$unfinished" "$wheels"/*.whl
chmod 755 "$unfinished"
mv "$unfinished" "$site"

PYTHONPATH=$site "$python" - <<'END'
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

for name in ("vllm", "torch", "transformers", "triton", "numpy", "redis"):
    with suppress(PackageNotFoundError):
        print(f"  {name} {version(name)}")
END
if [ -d "$site/vllm" ]; then
  PYTHONPATH=$site "$python" -c 'import torch, vllm._C_stable_libtorch; print("  CUDA", torch.version.cuda)' ||
    fail "vLLM is in $site, but its kernels do not load: they need torch for CUDA 13 and NVIDIA's driver"
fi
echo "export PYTHONPATH=$site"
