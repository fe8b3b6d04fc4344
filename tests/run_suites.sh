#!/usr/bin/env bash
# Runs make targets in lanes, side by side: most of a suite's time goes into waiting for processes to
# start, stop and notice each other. Each argument is a lane, its targets run one after the other.
#
#   tests/run_suites.sh "lint unit" "e2e"
#
# A suite's output is shown when it ends; what each took, and every skipped test, at the end. A lane stops
# at its first failure, the others go on. Interrupted, it waits until the tests have ended what they started.
set -euo pipefail
set -m # a lane is a process group, so that a signal reaches all of it

GRACE_S=60

logs=$(mktemp -d)
lanes=()

finish() {
  local lane give_up_at=$((SECONDS + GRACE_S))
  trap '' INT TERM # one is enough: the tests are ending
  for lane in "${lanes[@]}"; do
    kill -TERM -- "-$lane" 2>/dev/null || true
  done
  for lane in "${lanes[@]}"; do
    while kill -0 -- "-$lane" 2>/dev/null; do
      if [ "$SECONDS" -ge "$give_up_at" ]; then
        kill -KILL -- "-$lane" 2>/dev/null || true
        break
      fi
      sleep 0.2
    done
  done
  rm -rf "$logs"
}
trap finish EXIT
trap 'exit 130' INT TERM

show() {
  {
    flock 9
    printf '\n== %s\n' "$1"
    cat "$logs/$1.log"
  } 9>"$logs/lock"
}

run_lane() {
  local suite started verdict TIMEFORMAT='%0U %0S'
  for suite in $1; do
    started=$SECONDS
    verdict=''
    { time make --no-print-directory "$suite" >"$logs/$suite.log" 2>&1; } 2>"$logs/$suite.cpu" || verdict=FAILED
    printf '  %-12s %4d %5d  %s\n' "$suite" $((SECONDS - started)) \
      $(($(tr ' ' '+' <"$logs/$suite.cpu"))) "$verdict" >>"$logs/times"
    show "$suite"
    if [ -n "$verdict" ]; then
      return 1
    fi
  done
}

started=$SECONDS
for lane in "$@"; do
  run_lane "$lane" </dev/null &
  lanes+=($!)
done

failed=0
for lane in "${lanes[@]}"; do
  wait "$lane" || failed=1
done
lanes=()

printf '\nseconds per suite, and of CPU time, %d lanes side by side:\n' $#
cat "$logs/times"
printf 'skipped:\n'
grep -h '^SKIPPED' "$logs"/*.log || printf '  nothing\n'
printf 'together: %d seconds\n' $((SECONDS - started))
exit "$failed"
