#!/bin/bash
# Starts a command again when it fails: `restarting.sh NAME LIMIT SAVES GIVEN_UP COMMAND...`.
# LIMIT restarts without a trainer state of another step in SAVES/$RUN_ID between them; then it ends with the
# command's status. Docker counts over the whole life of a container, so a run of days would end at its fourth crash.
# The file GIVEN_UP tells a container that Docker starts again after that to end at once.
# Runs under `tini -s`, which adopts the processes that the command leaves behind.
set -uo pipefail
name=$1 limit=$2 states=$3/$RUN_ID/trainer_state given_up=$4
shift 4
leftover_grace_s=30

case $limit in
  '' | *[!0-9]*)
    echo "[error    ] restarts of the $name: a whole number, not \"$limit\"; set it and make up" >&2
    exit 2
    ;;
esac

if [ -e "$given_up" ]; then
  read -r status repeated <"$given_up"
  # Once: Docker starts it again several times, and the cause shall stay among the last lines.
  [ -n "$repeated" ] || echo "[error    ] $name was given up with status $status; mend the cause, then make up" >&2
  echo "$status repeated" >"$given_up"
  exit "$status"
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

newest_step() { # of the names NUMBER_step_STEP; each start saves one, of the step that it starts from
  find "$states" -maxdepth 1 -name '[0-9]*_step_*[0-9]' -printf '%f\n' 2>/dev/null | sort -n | tail -n 1 | sed 's/.*_//'
}

leftovers() { # living children of tini but this script; their children become tini's when they end
  local stat line fields
  for stat in /proc/[0-9]*/stat; do
    read -r line 2>/dev/null <"$stat" || continue
    read -ra fields <<<"${line##*) }" # state, parent, ...
    line=${line%% *}
    if [ "${fields[1]}" = "$PPID" ] && [ "${fields[0]}" != Z ] && [ "$line" != $$ ]; then echo "$line"; fi
  done
} 2>/dev/null # a process may end meanwhile

end_leftovers() { # a server of the command, which still has its ports and memory
  [ "$(cat "/proc/$PPID/comm")" = tini ] || return
  local pid told=' ' kill_at=$((SECONDS + leftover_grace_s))
  while [ -z "$stopped" ] && [ -n "$(leftovers)" ]; do
    for pid in $(leftovers); do
      if [ "$SECONDS" -ge "$kill_at" ]; then
        kill -KILL "$pid" 2>/dev/null
      elif [[ $told != *" $pid "* ]]; then
        kill -TERM "$pid" 2>/dev/null
        told+="$pid "
      fi
    done
    sleep 0.1
  done
}

failures=0 before=$(newest_step)
while true; do
  [ -z "$stopped" ] || exit 143
  "$@" &
  child=$!
  [ -z "$stopped" ] || stop # it came while there was no child
  finish
  if [ "$status" = 0 ] || [ -n "$stopped" ]; then exit "$status"; fi
  now=$(newest_step)
  if [ "$now" != "$before" ]; then failures=0 before=$now; fi
  failures=$((failures + 1))
  if [ "$failures" -gt "$limit" ]; then
    echo "[error    ] $name ended with status $status, $failures times without a new saved state: giving up; mend the cause, then make up" >&2
    echo "$status" >"$given_up"
    exit "$status"
  fi
  echo "[warning  ] $name ended with status $status; starting it again, $failures of $limit without a new saved state" >&2
  end_leftovers
  sleep 1
done
