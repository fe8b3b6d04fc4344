#!/bin/bash
# Prints the reward of each step, and every warning and error, of a trainer's log on standard input. awk would buffer
# up to 4 KB of lines.
set -euo pipefail
export LC_ALL=C # a decimal point in numbers

value() { # prints the value of a field in a log line
  local pattern=" $1=([^ ]+)"
  [[ $line =~ $pattern ]] && echo "${BASH_REMATCH[1]}"
}

while IFS= read -r line; do
  case $line in
    *"] step.finished "*)
      printf 'step %s/%s  reward %.3f  loss %.4f\n' \
        "$(value step)" "$(value steps)" "$(value reward/mean)" "$(value train/loss)"
      ;;
    *"[warning"* | *"[error"*) echo "$line" ;;
  esac
done
