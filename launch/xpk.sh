#!/usr/bin/env bash
# TPU slices on a GKE cluster made by XPK (`xpk cluster create`). XPK writes the JobSet.
#
#   CLUSTER=... TPU=v5p-128 IMAGE=... \
#     CONFIG=configs/qwen2_5_32b_gtpo.py WORKDIR=gs://... \
#     launch/xpk.sh --config.model.path=Qwen/Qwen2.5-32B [--config.a.b=VALUE ...]
#
# NAME       workload name; to reuse it, first delete the finished workload (xpk workload delete)
# SLICES     number of slices
# RESTARTS   maximum number of restarts after an interruption; exit status 1 or 2 ends the run
# GRACE      seconds from SIGTERM to SIGKILL
# XPK_FLAGS  further flags of `xpk workload create`, such as "--project=... --zone=... --spot"
set -euo pipefail
: "${NAME:=gtpo}" "${SLICES:=1}" "${RESTARTS:=50}" "${GRACE:=900}" "${XPK_FLAGS:=}"
: "${CLUSTER:?the XPK cluster}" "${TPU:?the TPU type, such as v5p-128}"
: "${IMAGE:?the container image}"
: "${CONFIG:?a config, such as configs/qwen2_5_32b_gtpo.py}"
: "${WORKDIR:?the folder of the run, such as gs://BUCKET/RUN}"

read -ra flags <<< "$XPK_FLAGS"
exec xpk workload create --workload="$NAME" --cluster="$CLUSTER" \
  --tpu-type="$TPU" --num-slices="$SLICES" --docker-image="$IMAGE" \
  --max-restarts="$RESTARTS" --termination-grace-period-seconds="$GRACE" "${flags[@]}" \
  --command="exec $(printf '%q ' gtpo train "--config=$CONFIG" "--workdir=$WORKDIR" "$@")"
