#!/bin/bash
# Removes what a CPU server or trainer never loads: `slim.sh PACKAGE...` of the Python environment on PATH.
# Run in the layer that installs the package: what a later layer removes stays in the image.
set -euo pipefail
site=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

for package in "$@"; do
  cd "$site/$package"
  if [ "$package" = torch ]; then
    # For compiling against torch, and its tests. torch_shm_manager stays: it keeps shared memory from
    # outliving the process that made it.
    rm -rf test include share
    find bin -type f ! -name torch_shm_manager -delete
  fi
  # Symbols for debuggers: vLLM's extension is several times larger with them.
  find . -name '*.so*' -type f -exec strip --strip-unneeded {} +
done
