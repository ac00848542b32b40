#!/usr/bin/env bash
# One TPU slice from a queued resource of Cloud TPU, without Kubernetes. Every host runs the image
# when it boots.
#
#   NAME=gtpo ZONE=us-central1-a TPU=v5litepod-16 IMAGE=... \
#     CONFIG=configs/qwen2_5_0_5b_gtpo.py WORKDIR=gs://... \
#     launch/tpu.sh --config.model.path=Qwen/Qwen2.5-0.5B [--config.a.b=VALUE ...]
#
# RUNTIME  the VM's image: v2-alpha-tpuv5-lite, v2-alpha-tpuv5 (v5p), v2-alpha-tpuv6e
# SPOT=1   cheaper, but can be preempted, which ends the request; the same command then deletes it,
#          requests the slice again and resumes
# GRACE    seconds from SIGTERM to SIGKILL
#
# Logs: gcloud compute tpus tpu-vm ssh "$NAME" --zone="$ZONE" --worker=all \
#         --command='sudo docker logs --follow gtpo'
# Stop: gcloud compute tpus queued-resources delete "$NAME" --zone="$ZONE" --force
set -euo pipefail
: "${NAME:=gtpo}" "${RUNTIME:=v2-alpha-tpuv5-lite}" "${SPOT:=}" "${GRACE:=600}"
: "${ZONE:?the zone}" "${TPU:?the accelerator type, such as v5litepod-16}"
: "${IMAGE:?the container image}"
: "${CONFIG:?a config, such as configs/qwen2_5_0_5b_gtpo.py}"
: "${WORKDIR:?the folder of the run, such as gs://BUCKET/RUN}"

resources=(gcloud compute tpus queued-resources)
state=$("${resources[@]}" describe "$NAME" --zone="$ZONE" --format='value(state.state)' 2>/dev/null || true)
case "$state" in
  SUSPENDED | FAILED) "${resources[@]}" delete "$NAME" --zone="$ZONE" --force --quiet ;;
  "") ;;
  *) echo "$NAME is $state; nothing to do" >&2; exit 0 ;;
esac

startup=$(mktemp)
trap 'rm -f "$startup"' EXIT
cat > "$startup" <<SCRIPT
#!/bin/bash
gcloud auth configure-docker --quiet $(printf '%q' "${IMAGE%%/*}")
docker rm --force gtpo
exec docker run --name=gtpo --privileged --network=host \\
  --stop-timeout=$(printf '%q' "$GRACE") $(printf '%q' "$IMAGE") \\
  train $(printf '%q ' "--config=$CONFIG" "--workdir=$WORKDIR" "$@")
SCRIPT
"${resources[@]}" create "$NAME" --node-id="$NAME" --zone="$ZONE" --accelerator-type="$TPU" \
  --runtime-version="$RUNTIME" --metadata-from-file=startup-script="$startup" \
  --scopes=cloud-platform ${SPOT:+--spot}
