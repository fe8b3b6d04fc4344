#!/usr/bin/env bash
# On the GPU host: installs the bundle of bundle.sh next to the host's packages. See docs/how-to/gpu-host.md.
#
#   install.sh PARTS_DIR [SITE_DIR]      afterwards: export PYTHONPATH=SITE_DIR
#
# SITE_DIR (default: PARTS_DIR/site) appears only after a complete installation. PYTHON names the host's
# interpreter (default: python3).
set -euo pipefail

parts=${1:?usage: install.sh PARTS_DIR [SITE_DIR]}
site=$(realpath --canonicalize-missing "${2:-$parts/site}")
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}

fail() {
  printf 'install.sh: %s\n' "$1" >&2
  exit 1
}

[ ! -e "$site" ] || fail "$site exists already; remove it, or name another directory"
"$python" -c 'import packaging, pip' || fail "$python lacks the package pip or packaging; set PYTHON to an interpreter that has both packages"

index=$parts/parts.sha256
[ -f "$index" ] || fail "$index is missing; copy this file from the directory that bundle.sh wrote"
mapfile -t names < <(awk '{print $2}' "$index")
missing=()
for name in "${names[@]}"; do
  [ -f "$parts/$name" ] || missing+=("$name")
done
[ ${#missing[@]} -eq 0 ] || fail "$parts lacks these parts of the bundle: ${missing[*]}; copy the missing parts"
damaged=$(cd "$parts" && sha256sum --check --quiet parts.sha256 2>/dev/null | cut -d: -f1) ||
  fail "copy these parts of the bundle again, because they are damaged: ${damaged//$'\n'/ }"

mkdir -p "$(dirname "$site")"
wheels=$(mktemp -d)
unfinished=$(mktemp -d "$site.XXXXXX")
trap 'rm -rf "$wheels" "$unfinished"' EXIT

# tar -J needs the program xz; Python decompresses xz itself.
(cd "$parts" && cat "${names[@]}") | "$python" -c '
import sys, tarfile
with tarfile.open(fileobj=sys.stdin.buffer, mode="r|xz") as archive:
    archive.extractall(sys.argv[1], filter="data")' "$wheels"
"$python" "$here/check_wheels.py" host "$wheels" ||
  fail "the bundle does not fit this host; to ignore a required version, add it to $here/left-out.txt"

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
    fail "vLLM is installed in $site, but its kernels do not load; the kernels need torch for CUDA 13 and NVIDIA's driver"
fi
echo "export PYTHONPATH=$site"
