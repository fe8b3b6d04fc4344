#!/bin/bash
# Starts a command again when it fails: `restarting.sh NAME LIMIT SAVES GIVEN_UP COMMAND...`.
# LIMIT restarts without a new trainer state in SAVES/$RUN_ID between them; then it ends with the command's
# status. Docker counts over the whole life of a container, so a run of days would end at its fourth crash.
# The file GIVEN_UP tells a container that Docker starts again after that to end at once.
set -uo pipefail
name=$1 limit=$2 states=$3/$RUN_ID/trainer_state given_up=$4
shift 4

if [ -e "$given_up" ]; then
  echo "[error    ] $name was given up; what it said before that says why" >&2
  exit "$(cat "$given_up")"
fi

child='' stopped=''
stop() {
  stopped=yes
  [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
}
trap stop TERM INT

finish() { # of the child; a signal interrupts "wait"
  wait "$child"
  status=$?
  while kill -0 "$child" 2>/dev/null; do
    wait "$child"
    status=$?
  done
  child=''
}

saved() { ls "$states" 2>/dev/null; }

failures=0 before=$(saved)
while true; do
  [ -z "$stopped" ] || exit 143
  "$@" &
  child=$!
  [ -z "$stopped" ] || stop # it came while there was no child
  finish
  if [ "$status" = 0 ] || [ -n "$stopped" ]; then exit "$status"; fi
  now=$(saved)
  if [ "$now" != "$before" ]; then failures=0 before=$now; fi
  failures=$((failures + 1))
  if [ "$failures" -gt "$limit" ]; then
    echo "[error    ] $name ended with status $status, $failures times without a new saved state: giving up" >&2
    echo "$status" >"$given_up"
    exit "$status"
  fi
  echo "[warning  ] $name ended with status $status; starting it again, $failures of $limit without a new saved state" >&2
done
