#!/bin/bash
# Prints the reward of each step until the trainer's Job has ended: `wait.sh RELEASE KUBECTL...`. The exit status is 0
# if the trainer succeeded. A new pod, or the new Job of an upgrade, continues the output.
set -uo pipefail
release=$1
shift
rewards=$(dirname "${BASH_SOURCE[0]}")/../containers/rewards.sh
labels=app.kubernetes.io/instance=$release,app.kubernetes.io/component=trainer
columns='{range .items[*]}{.metadata.name} {.status.phase} {.status.conditions[?(@.status=="True")].type}{"\n"}{end}'
failures=0

newest() { # newest KIND SELECTOR: prints name, phase and conditions of the newest object, and nothing if there is none
  "${kubectl[@]}" get "$1" --selector "$2" --sort-by .metadata.creationTimestamp --output "jsonpath=$columns" |
    sed -E '/^[^ ]*-[1-9][0-9]{0,5}-[a-z0-9]{5} /d' | tail -n 1 # pods JOB-INDEX-RANDOM: the first has rank 0
}

kubectl=("$@")
shown='' since='' waiting=''
while true; do
  if ! job=$(newest jobs "$labels"); then # kubectl has printed the reason
    failures=$((failures + 1))
    if [ $failures -ge 5 ]; then exit 1; fi
    sleep 2
    continue
  fi
  failures=0
  if [ -z "$job" ]; then
    echo "release $release has no trainer here; make helm-up starts one, NAMESPACE= and RELEASE= choose another" >&2
    exit 1
  fi
  read -r pod phase _ < <(newest pods "job-name=${job%% *}")
  case ${phase-} in
    Running | Succeeded | Failed)
      if [ "$pod" != "$shown" ]; then
        [ -z "$shown" ] || echo "the trainer continues in the pod $pod"
        shown=$pod since=''
      elif [ "$phase" != Running ]; then
        since=ended # all of its log was shown
      fi
      if [ "$since" != ended ]; then
        now=$(date -u +%Y-%m-%dT%H:%M:%SZ)
        "${kubectl[@]}" logs --follow --container trainer ${since:+"--since-time=$since"} "$pod" 2>/dev/null | bash "$rewards"
        since=$now
      fi
      ;;
    *)
      [ -n "$waiting" ] || echo "waiting for the trainer's pod; kubectl get pods shows the state of all pods"
      waiting=yes
      ;;
  esac
  case $job in
    *Complete*) echo "the trainer has finished" && exit 0 ;;
    *Failed*)
      echo "the trainer failed; its last lines:" >&2
      "${kubectl[@]}" logs --container trainer --tail 20 "$pod" >&2
      exit 1
      ;;
  esac
  sleep 1
done
