#!/bin/bash
# Prints the last log lines of every container that failed: `explain.sh COMPOSE...` with the compose command.
# A container that its restart policy restarted counts too, because Compose gives up at its first failure.
set -uo pipefail
"$@" ps --all --format '{{.ID}} {{.Service}}' | while read -r container service; do
  read -r state status restarts health started < <(docker inspect --format \
    '{{.State.Status}} {{.State.ExitCode}} {{.RestartCount}} {{with .State.Health}}{{.Status}}{{else}}none{{end}} {{.State.StartedAt}}' \
    "$container")
  logs=(docker logs "$container")
  if [ "$status" != 0 ]; then
    what="ended with status $status"
  elif [ "$state" = running ] && [ "$restarts" != 0 ]; then
    what="ended and was restarted (restart $restarts); its last lines before the restart"
    logs+=(--until "$started")
  elif [ "$health" = unhealthy ]; then
    what="is unhealthy"
  else
    continue
  fi
  printf '\n%s %s:\n' "$service" "$what" >&2
  "${logs[@]}" 2>&1 | tail -n 5 >&2
done
