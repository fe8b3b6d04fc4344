#!/bin/bash
# Removes files that a CPU server or trainer never loads: `slim.sh PACKAGE...`, packages of the Python on PATH.
# Run it in the layer that installs the package: files that a later layer removes stay in the image.
set -euo pipefail
site=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

for package in "$@"; do
  cd "$site/$package"
  if [ "$package" = torch ]; then
    # Headers and tests of torch. torch_shm_manager stays: it removes shared memory when the process that
    # created it ends.
    rm -rf test include share
    find bin -type f ! -name torch_shm_manager -delete
  fi
  # Debug symbols make vLLM's extension several times larger.
  find . -name '*.so*' -type f -exec strip --strip-unneeded {} +
done
