#!/bin/bash
# Shows the reward of each step until the trainer has ended, and ends with its exit status:
# `wait.sh SERVICE COMPOSE...`.
set -euo pipefail
service=$1
shift
container=$("$@" ps --all --quiet "$service")
if [ -z "$container" ]; then
  echo "there is no $service: start it with make up" >&2
  exit 1
fi

docker logs --follow "$container" 2>&1 | awk '
  function value(name) { return match($0, " " name "=[^ ]+") ? substr($0, RSTART + length(name) + 2, RLENGTH - length(name) - 2) : "" }
  /\] step / { printf "step %s/%s  reward %.3f  loss %.4f\n", value("step"), value("steps"), value("reward/mean"), value("train/loss"); fflush(); next }
  /\[(warning|error)/ { print; fflush() }
' || true
# Not "docker compose wait": it may miss a container that has ended already.
status=$(docker wait "$container")
echo "$service ended with status $status"
if [ "$status" != 0 ]; then
  docker logs --tail 20 "$container" >&2
fi
exit "$status"
