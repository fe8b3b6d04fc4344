#!/bin/bash
# Prints the reward of each step until the trainer's Job has ended: `wait.sh RELEASE KUBECTL...`. The exit status is 0
# if the trainer succeeded. A new pod of the Job continues the output.
set -euo pipefail
release=$1
shift
rewards=$(dirname "${BASH_SOURCE[0]}")/../containers/rewards.sh
labels=app.kubernetes.io/instance=$release,app.kubernetes.io/component=trainer
job=$("$@" get jobs --selector "$labels" --sort-by .metadata.creationTimestamp --output name | tail -n 1)
if [ -z "$job" ]; then
  echo "release $release has no trainer here; make helm-up starts one, NAMESPACE= and RELEASE= choose another" >&2
  exit 1
fi

newest_pod() {
  "$@" get pods --selector "job-name=${job#*/}" --sort-by .metadata.creationTimestamp --output name | tail -n 1
}
field() { "$@" --output "jsonpath=$path" --ignore-not-found; }

shown='' since=()
while true; do
  path='{.status.conditions[?(@.status=="True")].type}'
  ended=$(field "$@" get "$job")
  pod=$(newest_pod "$@")
  path='{.status.phase}'
  phase=$([ -z "$pod" ] || field "$@" get "$pod")
  if [ "$phase" = Running ] || { [ -n "$phase" ] && [ "$phase" != Pending ] && [ "$pod" != "$shown" ]; }; then
    if [ "$pod" != "$shown" ]; then
      [ -z "$shown" ] || echo "the trainer's pod was replaced; the new pod is ${pod#*/}"
      since=()
    fi
    shown=$pod
    until=$(date -u +%Y-%m-%dT%H:%M:%SZ)
    "$@" logs --follow --container trainer "${since[@]}" "$pod" 2>/dev/null | bash "$rewards" || true
    since=(--since-time "$until")
    until=
  fi
  case $ended in
    *Complete*) echo "the trainer has finished" && exit 0 ;;
    *Failed*)
      echo "the trainer failed; its last lines:" >&2
      "$@" logs --container trainer --tail 20 "$pod" >&2 || true
      exit 1
      ;;
  esac
  sleep 1
done
