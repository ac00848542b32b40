#!/usr/bin/env bash
# GPU nodes under Slurm: one task a node, which drives all its GPUs.
#
#   CONFIG=configs/qwen2_5_7b_gtpo.py WORKDIR=/shared/RUN sbatch --nodes=4 --gpus-per-node=8 launch/slurm.sh [--config.a.b=VALUE ...]
#
# GTPO         the program, installed with the extra `cuda` where every node sees it
# MAX_RESTARTS how often an interrupted run is put back into the queue
# One task a GPU instead: sbatch --ntasks-per-node=8 ...
#SBATCH --job-name=gtpo
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -uo pipefail
: "${GTPO:=gtpo}" "${MAX_RESTARTS:=100}"
: "${CONFIG:?a config, such as configs/qwen2_5_7b_gtpo.py}" "${WORKDIR:?the folder of the run, which every node sees}"

# JAX finds the coordinator and the ranks from Slurm's variables. It takes one GPU a task unless told otherwise.
if [[ ${SLURM_NTASKS_PER_NODE:-1} == 1 ]]; then
  JAX_LOCAL_DEVICE_IDS=$(seq --separator=, 0 $((${SLURM_GPUS_ON_NODE:-1} - 1)))
  export JAX_LOCAL_DEVICE_IDS
fi

# Ten minutes before the time is up (--signal) or when Slurm takes the nodes, each task gets a SIGTERM, saves, and ends with 143. A task
# that ends first must not have the others killed while they save.
srun --kill-on-bad-exit=0 "$GTPO" train --config="$CONFIG" --workdir="$WORKDIR" "$@"
status=$?
if ((status > 128 && ${SLURM_RESTART_COUNT:-0} < MAX_RESTARTS)); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
