#!/bin/bash
# Restarts a command when it fails: `restarting.sh NAME LIMIT SAVES GIVEN_UP COMMAND...`.
# After LIMIT restarts in a row without a checkpoint of a new step in SAVES/$RUN_ID it ends with the command's
# status. Docker's own limit counts over the whole life of a container, so a run of days would end at its fourth
# crash. If Docker restarts the container after that, the file GIVEN_UP makes this script end at once.
# It runs under `tini -s`, which adopts the processes that the command leaves behind.
set -uo pipefail
name=$1 limit=$2 states=$3/$RUN_ID/trainer_state given_up=$4
shift 4
leftover_grace_s=30

case $limit in
  '' | *[!0-9]*)
    echo "[error    ] number of restarts of the $name: expected a whole number, found \"$limit\"; correct the number and start the run again" >&2
    exit 2
    ;;
esac

if [ -e "$given_up" ]; then
  read -r status repeated <"$given_up"
  # Printed once: Docker restarts the container several times, and the cause must stay among the last lines.
  [ -n "$repeated" ] || echo "[error    ] $name is not restarted any more; its last exit status was $status. Remove the cause, then start the run again" >&2
  echo "$status repeated" >"$given_up"
  exit "$status"
fi

child='' stopped=''
stop() {
  stopped=yes
  [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
}
trap stop TERM INT

finish() { # waits for the child; a signal interrupts "wait"
  wait "$child"
  while kill -0 "$child" 2>/dev/null; do
    wait "$child"
  done
  wait "$child" # bash keeps the status of a child that has ended
  status=$?
  child=''
}

newest_step() { # prints STEP of the newest checkpoint NUMBER_step_STEP; every start writes one for its first step
  find "$states" -maxdepth 1 -name '[0-9]*_step_*[0-9]' -printf '%f\n' 2>/dev/null | sort -n | tail -n 1 | sed 's/.*_//'
}

leftovers() { # prints the running children of tini except this script; orphans of these children become tini's
  local stat line fields
  for stat in /proc/[0-9]*/stat; do
    read -r line 2>/dev/null <"$stat" || continue
    read -ra fields <<<"${line##*) }" # state, parent, ...
    line=${line%% *}
    if [ "${fields[1]}" = "$PPID" ] && [ "${fields[0]}" != Z ] && [ "$line" != $$ ]; then echo "$line"; fi
  done
} 2>/dev/null # a process may end while it is read

end_leftovers() { # ends processes, such as a server, that still hold ports and memory
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
  [ -z "$stopped" ] || stop # the signal came while there was no child
  finish
  if [ "$status" = 0 ] || [ -n "$stopped" ]; then exit "$status"; fi
  now=$(newest_step)
  if [ "$now" != "$before" ]; then failures=0 before=$now; fi
  failures=$((failures + 1))
  if [ "$failures" -gt "$limit" ]; then
    echo "[error    ] $name ended with status $status and is not restarted any more: $failures failures without a new checkpoint. Remove the cause, then start the run again" >&2
    echo "$status" >"$given_up"
    exit "$status"
  fi
  echo "[warning  ] $name ended with status $status; restarting it, restart $failures of $limit without a new checkpoint" >&2
  end_leftovers
  sleep 1
done
