#!/bin/bash
# The last words of every container that ended badly: `explain.sh COMPOSE...` with the compose command.
# One that its restart policy has started again counts too: Compose gives up at its first end.
set -uo pipefail
"$@" ps --all --format '{{.ID}} {{.Service}}' | while read -r container service; do
  read -r state status restarts health started < <(docker inspect --format \
    '{{.State.Status}} {{.State.ExitCode}} {{.RestartCount}} {{with .State.Health}}{{.Status}}{{else}}none{{end}} {{.State.StartedAt}}' \
    "$container")
  said=(docker logs "$container")
  if [ "$status" != 0 ]; then
    what="ended with status $status"
  elif [ "$state" = running ] && [ "$restarts" != 0 ]; then
    what="ended and was started again ($restarts so far); before that it said"
    said+=(--until "$started")
  elif [ "$health" = unhealthy ]; then
    what="is unhealthy"
  else
    continue
  fi
  printf '\n%s %s:\n' "$service" "$what" >&2
  "${said[@]}" 2>&1 | tail -n 5 >&2
done
