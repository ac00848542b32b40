#!/usr/bin/env bash
# TPU slices on any GKE cluster with the JobSet and Kueue controllers. Prints the JobSet.
#
#   ACCELERATOR=tpu-v5p-slice TOPOLOGY=4x4x4 IMAGE=... \
#     CONFIG=configs/qwen2_5_32b_gtpo.py WORKDIR=gs://... \
#     launch/gke.sh --config.model.path=Qwen/Qwen2.5-32B [--config.a.b=VALUE ...] | kubectl apply -f -
#
# ACCELERATOR      TPU type of the node pool: tpu-v5-lite-podslice, tpu-v5p-slice, tpu-v6e-slice
# CHIPS            chips per host
# QUEUE            Kueue's LocalQueue; it holds the job back until the complete slice is free
# SERVICE_ACCOUNT  Kubernetes service account, bound to one that can write to WORKDIR
# SLICES           number of slices
# RESTARTS         maximum number of restarts
# GRACE            seconds from SIGTERM to SIGKILL
set -euo pipefail
: "${NAME:=gtpo}" "${SLICES:=1}" "${CHIPS:=4}" "${RESTARTS:=50}" "${GRACE:=900}"
: "${QUEUE:=multislice-queue}" "${SERVICE_ACCOUNT:=default}"
: "${ACCELERATOR:?the TPU type of the node pool, such as tpu-v5p-slice}"
: "${TOPOLOGY:?the slice, such as 4x4x4}" "${IMAGE:?the container image}"
: "${CONFIG:?a config, such as configs/qwen2_5_32b_gtpo.py}"
: "${WORKDIR:?the folder of the run, such as gs://BUCKET/RUN}"

if ! [[ $TOPOLOGY =~ ^[0-9]+(x[0-9]+)+$ ]]; then
  echo "TOPOLOGY must be numbers joined by x, such as 4x4x4; got $TOPOLOGY" >&2
  exit 2
fi
hosts=$((${TOPOLOGY//x/*} / CHIPS))
if ! ((hosts > 0 && hosts * CHIPS == ${TOPOLOGY//x/*})); then
  echo "TOPOLOGY=$TOPOLOGY: the number of chips is not a multiple of CHIPS=$CHIPS per host" >&2
  exit 2
fi
quoted() {  # prints a YAML string
  local text=${1//\\/\\\\}
  printf '"%s"' "${text//\"/\\\"}"
}

cat <<MANIFEST
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $(quoted "$NAME")
  labels:
    kueue.x-k8s.io/queue-name: $(quoted "$QUEUE")
  annotations:
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool  # a slice per pool
spec:
  network:
    enableDNSHostnames: true  # the hosts find one another by name
    publishNotReadyAddresses: true
  failurePolicy:
    maxRestarts: $RESTARTS  # all hosts restart together, from the newest checkpoint
    rules:
      - action: FailJobSet  # a restart cannot fix wrong input
        onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
    - name: slice
      replicas: $SLICES
      template:
        spec:
          parallelism: $hosts
          completions: $hosts
          completionMode: Indexed
          backoffLimit: 0
          podFailurePolicy:
            rules:
              - action: FailJob
                onExitCodes: {containerName: gtpo, operator: In, values: [2]}
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: $GRACE  # from SIGTERM to SIGKILL; a checkpoint must fit
              serviceAccountName: $(quoted "$SERVICE_ACCOUNT")
              nodeSelector:
                cloud.google.com/gke-tpu-accelerator: $(quoted "$ACCELERATOR")
                cloud.google.com/gke-tpu-topology: $(quoted "$TOPOLOGY")
              containers:
                - name: gtpo
                  image: $(quoted "$IMAGE")
                  env:
                    # Overlaps the sums of gradients between slices with computing; see
                    # DATA_PARALLEL_OVERLAP in MaxText's benchmarks/xla_flags_library.py.
                    - name: LIBTPU_INIT_ARGS
                      value: >-
                        --xla_tpu_enable_data_parallel_all_reduce_opt=true
                        --xla_tpu_data_parallel_opt_different_sized_ops=true
                  args:
                    - train
$(for arg in "--config=$CONFIG" "--workdir=$WORKDIR" "$@"; do echo "                    - $(quoted "$arg")"; done)
                  resources:
                    limits: {google.com/tpu: $CHIPS}
MANIFEST
