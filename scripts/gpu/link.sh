#!/usr/bin/env bash
# On the GPU host: makes our packages importable from SITE_DIR, into which install.sh installed their requirements.
#
#   scripts/gpu/link.sh SITE_DIR
#
# Creates links to this checkout's sources and writes each package's metadata, in which vLLM finds our plugin
# (entry point vllm.general_plugins). pip would copy the sources. An editable install needs .pth files, which
# Python ignores in directories of PYTHONPATH. PYTHON names the host's interpreter with setuptools (default:
# python3).
set -euo pipefail

site=${1:?usage: link.sh SITE_DIR}
repo=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
[ -d "$site" ] || {
  echo "link.sh: $site does not exist; run install.sh first" >&2
  exit 1
}
site=$(cd "$site" && pwd)
metadata=$(mktemp -d)
trap 'rm -rf "$metadata"' EXIT

"$python" - "$metadata" "$repo/shared" "$repo"/services/* <<'END' >/dev/null
import os
import sys

from setuptools.build_meta import prepare_metadata_for_build_wheel

metadata, *projects = sys.argv[1:]
for project in projects:
    os.chdir(project)
    # One directory per package, because setuptools requires an empty one.
    described = os.path.join(metadata, os.path.basename(project))
    os.mkdir(described)
    prepare_metadata_for_build_wheel(described)
END
rm -rf "$site"/grpo_*.dist-info
cp -R "$metadata"/*/*.dist-info "$site"
for package in "$repo"/shared/*/__init__.py "$repo"/services/*/*/__init__.py; do
  ln -sfn "$(dirname "$package")" "$site/"
done

PYTHONPATH=$site "$python" -P - <<'END'
from importlib.metadata import entry_points

(plugin,) = entry_points(group="vllm.general_plugins", name="grpo_shared_weights")
print(f"created the links; vLLM finds the plugin {plugin.name} ({plugin.value})")
END
