#!/usr/bin/env bash
#SBATCH --job-name=grpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=72:00:00
#SBATCH --output=logs/slurm_%j.out
#SBATCH --open-mode=append
#SBATCH --requeue

# `sbatch online.sh MODEL [RUN.yaml] [OPTION...]`: one run on all nodes of the job. The first node
# starts everything: Redis, run-api, the inference server, the environments and ranks of the trainer.
# The others start ranks. After a node has failed, Slurm queues the job again, and the run resumes.
# Its files are in runs/slurm-JOB. docs/how-to/several-gpus.md describes the variables.
#
# Slurm reads #SBATCH lines only up to the first command, and opens the log before this script runs,
# so the directory logs/ is part of the repository.

set -euo pipefail

if [[ $# -eq 0 || -z ${SLURM_JOB_ID:-} ]]; then
  echo "online.sh: write sbatch online.sh MODEL [RUN.yaml] [OPTION...]" >&2
  exit 2
fi

# Slurm runs a copy of this script, which the other nodes do not have.
cd "$SLURM_SUBMIT_DIR"
if [[ -z ${ONLINE_STEP:-} ]]; then
  export ONLINE_STEP=1
  # exec: a signal to the batch script reaches srun, which passes it on to the nodes.
  exec srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 \
    bash online.sh "$@"
fi

python=${PYTHON:-.venv/bin/python} model=$1
shift
gpus=${SLURM_GPUS_ON_NODE:-0}
ranks=${RANKS:-$((gpus > 0 ? gpus : 1))}
meeting=()
if ((SLURM_JOB_NUM_NODES > 1)); then
  first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  address=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
  port=${RENDEZVOUS_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
  meeting=(--nodes "$SLURM_JOB_NUM_NODES" --rendezvous "$address:$port")
fi

if ((SLURM_NODEID > 0)); then
  exec "$python" -m grpo_trainer --model "$model" "${meeting[@]}" --ranks "$ranks" \
    --save-path "runs/slurm-$SLURM_JOB_ID-node-$SLURM_NODEID"
fi

# A GPU of the first node is the server's.
meeting+=(--ranks "${FIRST_RANKS:-$((gpus > 1 ? gpus - 1 : ranks))}")
run=runs/slurm-$SLURM_JOB_ID
meeting+=(--run-dir "$run")
if [[ -d $run/checkpoints/trainer_state ]]; then
  meeting[-2]=--resume # which reads the configuration of the run, so without RUN.yaml
  [[ ${1:--} == -* ]] || shift
fi
exec "$python" -m grpo_runs run "$@" --model "$model" "${meeting[@]}"
