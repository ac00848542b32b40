#!/usr/bin/env bash
# GPU nodes under Slurm, with one task per node that uses all its GPUs.
#
#   CONFIG=configs/qwen2_5_7b_gtpo.py WORKDIR=/shared/RUN \
#     sbatch --nodes=4 --gpus-per-node=8 launch/slurm.sh --config.model.path=Qwen/Qwen2.5-7B \
#     [--config.a.b=VALUE ...]
#
# GTPO                 the program, installed with the extra `cuda` or `cuda12` where every node can run it
# MAX_RESTARTS         how often an interrupted run is requeued
# GTPO_JOIN_TIMEOUT_S  how long a task waits for the others at the start, in seconds
#
# For one task per GPU: sbatch --ntasks-per-node=8 ...
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
: "${CONFIG:?a config, such as configs/qwen2_5_7b_gtpo.py}"
: "${WORKDIR:?the folder of the run, on a file system that all nodes share}"

# The tasks find one another through Slurm's variables, and the tasks of a node share its GPUs
# evenly.
#
# Overlaps communication with computing; NVIDIA's own images set the same flag:
# https://docs.nvidia.com/jax-toolbox/environment-variables
export XLA_FLAGS="--xla_gpu_enable_latency_hiding_scheduler=true ${XLA_FLAGS:-}"

# Ten minutes before the time limit (--signal), or when Slurm preempts the job, each task receives
# SIGTERM, saves, and exits with 143. The first task to exit must not make Slurm kill those that are
# still saving (--kill-on-bad-exit=0).
srun --kill-on-bad-exit=0 "$GTPO" train --config="$CONFIG" --workdir="$WORKDIR" "$@"
status=$?
if ((status > 128 && ${SLURM_RESTART_COUNT:-0} < MAX_RESTARTS)); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
