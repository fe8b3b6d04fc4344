#!/bin/bash
# Waits for a service to end, and ends with its exit status: `wait.sh SERVICE COMPOSE...`.
set -euo pipefail
service=$1
shift
container=$("$@" ps --all --quiet "$service")
if [ -z "$container" ]; then
  echo "there is no $service: start it with make up" >&2
  exit 1
fi
# Not "docker compose wait": it may miss a container that has ended already.
status=$(docker wait "$container")
"$@" logs --no-log-prefix --tail 3 "$service"
echo "$service ended with status $status"
exit "$status"
