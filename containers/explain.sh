#!/bin/bash
# The last words of every container that ended badly: `explain.sh COMPOSE...` with the compose command.
set -uo pipefail
"$@" ps --all --format '{{.ID}} {{.Service}} {{.ExitCode}}' | while read -r container service status; do
  if [ "$status" != 0 ]; then
    printf '\n%s ended with status %s:\n' "$service" "$status" >&2
    docker logs --tail 5 "$container" >&2
  fi
done
