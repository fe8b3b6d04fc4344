#!/bin/bash
# The last words of every container that ended badly: `explain.sh COMPOSE...` with the compose command.
set -uo pipefail
"$@" ps --all --format '{{.Service}} {{.ExitCode}}' | while read -r service status; do
  if [ "$status" != 0 ]; then
    printf '\n%s ended with status %s:\n' "$service" "$status" >&2
    "$@" logs --no-log-prefix --tail 5 "$service" >&2
  fi
done
