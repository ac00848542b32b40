#!/usr/bin/env bash
# TPU slices on a GKE cluster that XPK made (`xpk cluster create`): XPK writes the JobSet.
#
#   CLUSTER=... TPU=v5p-128 IMAGE=... CONFIG=configs/qwen2_5_32b_gtpo.py WORKDIR=gs://... launch/xpk.sh [--config.a.b=VALUE ...]
#
# NAME       of the workload; one that has ended must be deleted before its name is used again (xpk workload delete)
# SLICES     how many slices
# RESTARTS   how often a run that was interrupted begins again; exit status 2 (wrong input) and 1 end it
# GRACE      seconds that it has to save when it is asked to stop
# XPK_FLAGS  more flags of `xpk workload create`, such as "--project=... --zone=... --spot"
set -euo pipefail
: "${NAME:=gtpo}" "${SLICES:=1}" "${RESTARTS:=50}" "${GRACE:=900}" "${XPK_FLAGS:=}"
: "${CLUSTER:?the XPK cluster}" "${TPU:?the TPU type, such as v5p-128}" "${IMAGE:?the container image}"
: "${CONFIG:?a config, such as configs/qwen2_5_32b_gtpo.py}" "${WORKDIR:?the folder of the run, such as gs://BUCKET/RUN}"

read -ra flags <<< "$XPK_FLAGS"
exec xpk workload create --workload="$NAME" --cluster="$CLUSTER" --tpu-type="$TPU" --num-slices="$SLICES" --docker-image="$IMAGE" \
  --max-restarts="$RESTARTS" --termination-grace-period-seconds="$GRACE" "${flags[@]}" \
  --command="exec $(printf '%q ' gtpo train "--config=$CONFIG" "--workdir=$WORKDIR" "$@")"
