#!/usr/bin/env bash
# Runs the named make targets one after another and says how long each took.
# Stops at the first that fails.
set -euo pipefail

times=()
report() {
  printf '\nseconds per suite:\n'
  printf '  %s\n' "${times[@]}"
}
trap report EXIT

for suite in "$@"; do
  printf '\n== %s\n' "$suite"
  started=$SECONDS
  if ! make --no-print-directory "$suite"; then
    times+=("$(printf '%-12s %4d  FAILED' "$suite" $((SECONDS - started)))")
    exit 1
  fi
  times+=("$(printf '%-12s %4d' "$suite" $((SECONDS - started)))")
done
