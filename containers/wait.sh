#!/bin/bash
# Shows the reward of each step until the trainer has ended for good, and ends with its exit status:
# `wait.sh SERVICE COMPOSE...`. One that its restart policy starts again is waited for.
set -euo pipefail
export LC_ALL=C # a point in numbers
service=$1
shift
container=$("$@" ps --all --quiet "$service")
if [ -z "$container" ]; then
  echo "there is no $service: start it with make up" >&2
  exit 1
fi

state() { docker inspect --format "{{.State.$1}}" "$container"; }
starts() { docker inspect --format '{{.RestartCount}}' "$container"; }

if [ "$(state Status)" = created ]; then
  echo "$service was made and never started: make up says why, make ps what it waits for" >&2
  exit 1
fi

value() { # of the name in a line of the log
  local pattern=" $1=([^ ]+)"
  [[ $line =~ $pattern ]] && echo "${BASH_REMATCH[1]}"
}

show() { # what it logs until it ends; not with awk, which may keep lines back until it has 4 KB of them
  docker logs --follow "$@" "$container" 2>&1 | while IFS= read -r line; do
    case $line in
      *"] step "*)
        printf 'step %s/%s  reward %.3f  loss %.4f\n' \
          "$(value step)" "$(value steps)" "$(value reward/mean)" "$(value train/loss)"
        ;;
      *"[warning"* | *"[error"*) echo "$line" ;;
    esac
  done || true
  shown_until=$(date -u +%Y-%m-%dT%H:%M:%SZ)
}

shown=$(starts)
show
# Neither "docker wait" alone, which returns at an end that is not the last, nor "docker compose wait",
# which may miss a container that has ended already.
while [ "$(state Running)" = true ]; do
  if [ "$(starts)" != "$shown" ]; then
    ended=$(state FinishedAt)
    while [ "$(state Restarting)" = true ]; do sleep 0.2; done
    shown=$(starts)
    echo "$service ended and was started again ($shown so far)"
    show --since "$ended"
  else # the end is being recorded, or its log broke off
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
