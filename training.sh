#!/usr/bin/env bash
#SBATCH --job-name=OpenR1_GRPO
#SBATCH --account=mltheory
#SBATCH --partition=mltheory
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gres=gpu:a100:7
#SBATCH --cpus-per-task=64
#SBATCH --mem=256G
#SBATCH --time=72:00:00
#SBATCH --output=logs/slurm_%j.out
#SBATCH --error=logs/slurm_%j.err
#SBATCH --exclusive

# `sbatch training.sh` or `bash training.sh`: starts vllm-api-server on the first GPU and the
# training on the others, and ends both. Further words go to the trainer: `bash training.sh
# --max_steps 5`. docs/how-to/training-guide.md describes the variables.
#
# Slurm reads #SBATCH lines only up to the first command, and opens the two logs before this script
# runs, so the directory logs/ is part of the repository.

set -euo pipefail

fail() {
  echo "training.sh: $*" >&2
  exit 1
}

# Slurm runs a copy of this script; the repository is where sbatch was called.
home=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[[ -f $home/src/grpo.py ]] || home=${SLURM_SUBMIT_DIR:-$PWD}
cd "$home"
[[ -f src/grpo.py ]] || fail "no src/grpo.py in $home; call sbatch in the repository"
mkdir -p logs

# --- one step of the job ---------------------------------------------------------------------

if [[ -n ${SLURM_JOB_ID:-} && -z ${TRAINING_STEP:-} ]]; then
  export TRAINING_STEP=1
  step=(srun --ntasks=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}")
  [[ -z ${SLURM_GPUS_ON_NODE:-} ]] || step+=(--gres="gpu:$SLURM_GPUS_ON_NODE")
  # exec: a signal to the batch script reaches srun, which passes it on to the step.
  exec "${step[@]}" bash "$home/training.sh" "$@"
fi

# --- variables -------------------------------------------------------------------------------

if [[ ${MAXENT:-0} == 1 ]]; then method=maxent-grpo; else method=grpo; fi
TRAIN_ENTRYPOINT=${TRAIN_ENTRYPOINT:-src/$method.py}
CONFIG=${CONFIG:-recipes/Qwen2.5-1.5B-Instruct/$(basename "$TRAIN_ENTRYPOINT" .py)/config_math.yaml}
CONFIG_FILE=${CONFIG_FILE:-recipes/accelerate_configs/ranks.yaml}
MAIN_PROCESS_PORT=${MAIN_PROCESS_PORT:-29525}
VLLM_PORT=${VLLM_PORT:-8000}
VLLM_START_DEADLINE_S=${VLLM_START_DEADLINE_S:-1800}
STOP_GRACE_S=${STOP_GRACE_S:-20} # below Slurm's KillWait of 30 s
TIMESTAMP=${TIMESTAMP:-$(date +%Y%m%d_%H%M%S)}

recipe=$(dirname "$CONFIG") # recipes/tiny/grpo → tiny-grpo
RUN_NAME=${RUN_NAME:-$(basename "$(dirname "$recipe")")-$(basename "$recipe")}
RUN_NAME=${RUN_NAME//\//-}
SERVER_LOG=logs/liv_vllm_${RUN_NAME}_${TIMESTAMP}.log
TRAINING_LOG=logs/liv_train_${RUN_NAME}_${TIMESTAMP}.log

[[ -f $TRAIN_ENTRYPOINT ]] || fail "TRAIN_ENTRYPOINT: no file $TRAIN_ENTRYPOINT"
[[ -f $CONFIG ]] || fail "CONFIG: no file $CONFIG"

# --- Python: the current environment, or one of conda if USE_CONDA=1 asks for it ---------------

if [[ ${USE_CONDA:-0} == 1 ]]; then
  command -v conda >/dev/null || fail "USE_CONDA=1, but conda is not on PATH"
  conda env update --quiet --prefix "$home/.conda" --file environment.yml
  PYTHON=$home/.conda/bin/python
elif [[ -z ${PYTHON:-} ]]; then
  PYTHON=$(command -v python || command -v python3)
  if [[ -z ${VIRTUAL_ENV:-}${CONDA_PREFIX:-} && -x .venv/bin/python ]]; then
    PYTHON=$home/.venv/bin/python # of make install
  fi
fi
export PYTHONUNBUFFERED=1

# --- what the recipe needs: a mistake in it ends the job here ----------------------------------

GPUS=
if command -v nvidia-smi >/dev/null && found=$(nvidia-smi -L 2>/dev/null) && [[ -n $found ]]; then
  echo "$found"
  GPUS=${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $(($(wc -l <<<"$found") - 1)))}
fi
export GPUS

flags=(--config "$CONFIG" --use_vllm --run_name "${RUN_NAME}-${TIMESTAMP}")
flags+=(--vllm_server_base_url "http://127.0.0.1:$VLLM_PORT")
[[ -z ${VLLM_MODEL:-} ]] || flags+=(--model_name_or_path "$VLLM_MODEL")
[[ -z ${SYNC_MODE:-} ]] || flags+=(--sync_mode "$SYNC_MODE")
flags+=("$@")

model='' mode='' redis='' server_gpus='' train_gpus='' ranks='' arguments=()
plan=$("$PYTHON" -m grpo_runs.recipe.server_plan "$TRAIN_ENTRYPOINT" "${flags[@]}")
while IFS='=' read -r name value; do
  case $name in
    argument) arguments+=("$value") ;;
    *) printf -v "$name" %s "$value" ;;
  esac
done <<<"$plan"
flags+=(--sync_mode "$mode")
if [[ -z $GPUS ]]; then
  export TORCHDYNAMO_DISABLE=1 # vLLM would compile a function for seconds, in eager mode too
  flags+=(--use_cpu)
fi

if [[ $model == runs/tiny-model && ! -f $model/config.json ]]; then
  "$PYTHON" -m grpo_tiny_model --directory "$model"
fi

# --- processes: each leads a group of its own, which is ended as a whole -----------------------

state=$(mktemp -d)
groups=()
started=

start() { # start LOG COMMAND...
  local log=$1
  shift
  setsid "$@" >"$log" 2>&1 </dev/null &
  started=$!
  groups+=("$started")
}

is_alive() { # is_alive GROUP: a member that is no zombie
  ps -e -o pgid=,stat= | awk -v group="$1" \
    '$1 == group && $2 !~ /^Z/ { found = 1 } END { exit !found }'
}

end_all() {
  trap '' TERM INT HUP
  local deadline=$((SECONDS + STOP_GRACE_S)) number group
  # The training first: it uses the server while it saves.
  for ((number = ${#groups[@]} - 1; number >= 0; number--)); do
    group=${groups[number]}
    kill -TERM -- "-$group" 2>/dev/null || true
    while is_alive "$group" && ((SECONDS < deadline)); do sleep 0.2; done
  done
  for group in "${groups[@]}"; do kill -KILL -- "-$group" 2>/dev/null || true; done
  rm -rf "$state"
}

trap end_all EXIT
trap 'exit 143' TERM
trap 'exit 130' INT
trap 'exit 129' HUP

ended() { # ended NAME LOG: a process that should live has ended
  echo "training.sh: $1 has ended; the last lines of $2:" >&2
  tail -n 20 "$2" >&2
  # A launcher prints a traceback of its own behind the cause.
  local cause
  cause=$(grep -aE '^(src/[a-z-]+\.py|vllm-api-server): |\[error +\]' "$2" | tail -n 1 || true)
  [[ -z $cause || $cause == "$(tail -n 1 "$2")" ]] || echo "$cause" >&2
  exit 1
}

if [[ $redis == yes ]]; then
  binary=$("$PYTHON" -c 'from grpo_core.redis.server import redis_binary; print(redis_binary())')
  start "$state/redis.log" "$binary" --port 0 --unixsocket "$state/redis.sock" \
    --dir "$state" --save ''
  redis_group=$started
  export REDIS_URL=unix://$state/redis.sock
  until [[ -S $state/redis.sock ]]; do
    is_alive "$redis_group" || ended Redis "$state/redis.log"
    sleep 0.2
  done
else
  arguments+=(--redis-url none)
fi

echo "server:   $SERVER_LOG"
CUDA_VISIBLE_DEVICES=$server_gpus start "$SERVER_LOG" \
  "$PYTHON" -m grpo_vllm --port "$VLLM_PORT" "${arguments[@]}"
server=$started
deadline=$((SECONDS + VLLM_START_DEADLINE_S))
until curl -sf --noproxy '*' --max-time 5 "http://127.0.0.1:$VLLM_PORT/health" >/dev/null; do
  kill -0 "$server" 2>/dev/null || ended vllm-api-server "$SERVER_LOG"
  if ((SECONDS >= deadline)); then
    tail -n 20 "$SERVER_LOG" >&2
    fail "vllm-api-server is not healthy after VLLM_START_DEADLINE_S=$VLLM_START_DEADLINE_S s"
  fi
  sleep 1
done

echo "training: $TRAINING_LOG"
launch=(accelerate.commands.launch --config_file "$CONFIG_FILE" --num_processes "$ranks")
launch+=(--main_process_port "$MAIN_PROCESS_PORT")
((ranks == 1)) || launch+=(--multi_gpu)
if [[ -z $GPUS ]] && ((ranks > 1)); then # accelerate starts CPU ranks only with MPI
  launch=(torch.distributed.run --nproc-per-node "$ranks" --master-port "$MAIN_PROCESS_PORT")
fi
CUDA_VISIBLE_DEVICES=$train_gpus start "$TRAINING_LOG" \
  "$PYTHON" -m "${launch[@]}" "$TRAIN_ENTRYPOINT" "${flags[@]}"
trainer=$started

# No `wait` for the server: it never ends by itself, and would hold the job.
while kill -0 "$trainer" 2>/dev/null; do
  kill -0 "$server" 2>/dev/null || ended vllm-api-server "$SERVER_LOG"
  sleep 1
done
status=0
wait "$trainer" || status=$?

((status == 0)) || ended "the training, with status $status," "$TRAINING_LOG"
tail -n 8 "$TRAINING_LOG"
