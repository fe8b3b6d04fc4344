#!/bin/bash
# Prints the reward of each step until the trainer has ended, then ends with the trainer's exit status:
# `wait.sh SERVICE COMPOSE...`. If the restart policy restarts the trainer, the script continues.
set -euo pipefail
rewards=$(dirname "${BASH_SOURCE[0]}")/rewards.sh
service=$1
shift
container=$("$@" ps --all --quiet "$service")
if [ -z "$container" ]; then
  echo "the container $service does not exist; run make up to create the container" >&2
  exit 1
fi

state() { docker inspect --format "{{.State.$1}}" "$container"; }
starts() { docker inspect --format '{{.RestartCount}}' "$container"; }

if [ "$(state Status)" = created ]; then
  echo "$service was created but not started; make up prints the reason, and make ps lists the services that $service waits for" >&2
  exit 1
fi

show() { # prints the log until the container ends
  docker logs --follow "$@" "$container" 2>&1 | bash "$rewards" || true
  shown_until=$(date -u +%Y-%m-%dT%H:%M:%SZ)
}

shown=$(starts)
show
# "docker wait" returns at the first end, even if a restart follows. "docker compose wait" may miss a container
# that has ended already.
while [ "$(state Running)" = true ]; do
  if [ "$(starts)" != "$shown" ]; then
    ended=$(state FinishedAt)
    while [ "$(state Restarting)" = true ]; do sleep 0.2; done
    shown=$(starts)
    echo "$service ended and was restarted (restart $shown)"
    show --since "$ended"
  else # Docker is recording the end, or the log stream was interrupted
    sleep 0.5
    if [ "$(state Running)" = true ] && [ "$(starts)" = "$shown" ]; then
      show --since "$shown_until"
    fi
  fi
done
status=$(state ExitCode)
echo "$service ended with status $status"
if [ "$status" != 0 ]; then
  docker logs --tail 20 "$container" >&2
fi
exit "$status"
